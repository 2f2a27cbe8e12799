"""Rows of several workers are joined in order for one inference call, and split back exactly."""

import numpy as np
import pytest
import torch

from rlightning.errors import ContractError
from rlightning.policy.joining import ROW_OWNERS, join_rows, rows_of, split_rows
from rlightning.types import EnvRet, PolicyResponse


def one(env_id, value, **fields):
    """A worker of one row: no leading axis."""
    return EnvRet(env_id, np.full(2, value, np.float32), 0.5, False, False, **fields)


def many(env_id, *values, **fields):
    """A worker of several rows."""
    rows = len(values)
    observation = np.array([[v, v] for v in values], np.float32)
    flags = np.zeros(rows, bool)
    return EnvRet(env_id, observation, np.arange(rows, dtype=np.float32), flags, flags, **fields)


def test_rows_are_counted():
    assert rows_of(one("a", 1)) is None
    assert rows_of(many("a", 1, 2)) == 2
    assert rows_of(many("a", 1, 2).cpu()) == 2


def test_workers_of_one_and_many_rows_are_joined_in_order():
    joined = join_rows([one("a-0", 1), many("b-1", 2, 3), one("c-2", 4)])
    assert joined.observation.tolist() == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert joined.last_reward.tolist() == [0.5, 0, 1, 0.5]
    assert joined.last_terminated.shape == (4,)
    assert joined.last_terminated.dtype == bool
    assert joined.env_id == "a-0+b-1+c-2"
    assert joined.info == {ROW_OWNERS: (("a-0", 1), ("b-1", 2), ("c-2", 1))}


def test_one_worker_of_many_rows_is_passed_as_it_is():
    ret = many("a", 1, 2)
    assert join_rows([ret]) is ret


def test_one_worker_of_one_row_gets_an_axis_and_loses_it():
    ret = one("a-0", 3)
    assert join_rows([ret]).observation.shape == (1, 2)
    [part] = split_rows(PolicyResponse("a-0", action=torch.tensor([[7.0]])), [ret])
    assert part.action.shape == (1,)
    assert part.env_id == "a-0"


@pytest.mark.parametrize("container", ["dict", "tuple", "nested"])
def test_observations_in_containers_are_joined_leaf_by_leaf(container):
    def observe(value, rows):
        x = np.full((rows, 2) if rows else 2, value, np.float32)
        return {"dict": {"x": x}, "tuple": (x,), "nested": {"a": (x, {"b": x})}}[container]

    rets = [
        EnvRet("a-0", observe(1, None)),
        EnvRet("b-1", observe(2, 2), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool)),
    ]
    observation = join_rows(rets).observation
    leaf = {
        "dict": lambda o: o["x"],
        "tuple": lambda o: o[0],
        "nested": lambda o: o["a"][1]["b"],
    }[container](observation)
    assert leaf.tolist() == [[1, 1], [2, 2], [2, 2]]


def test_numbers_as_observations_get_an_axis():
    joined = join_rows([EnvRet("a", np.int64(3)), EnvRet("b", 4)])
    assert joined.observation.tolist() == [3, 4]


def test_tensors_stay_tensors():
    rets = [many("a", 1, 2).cpu(), one("b", 3).cpu()]
    joined = join_rows(rets)
    assert isinstance(joined.observation, torch.Tensor)
    assert joined.observation.tolist() == [[1, 1], [2, 2], [3, 3]]


def test_last_observations_of_finished_episodes_are_joined_with_their_mask():
    ended = many(
        "a-0",
        1,
        2,
        info={
            "final_obs": np.array([[9, 9], [0, 0]], np.float32),
            "_final_obs": np.array([True, False]),
        },
    )
    joined = join_rows([one("b-1", 5), ended])
    assert joined.info["_final_obs"].tolist() == [False, True, False]
    assert joined.info["final_obs"].tolist() == [[5, 5], [9, 9], [0, 0]]


def test_last_observations_of_tensor_environments_are_joined_too():
    ended = many(
        "a-0", 1, 2, info={"final_obs": torch.ones(2, 2), "_final_obs": torch.tensor([True, False])}
    ).cpu()
    joined = join_rows([ended, many("b-1", 3).cpu()])
    assert joined.info["_final_obs"].tolist() == [True, False, False]


def test_an_ended_worker_of_one_row_is_joined():
    ended = one("a-0", 1, info={"final_obs": np.full(2, 8, np.float32), "_final_obs": np.True_})
    joined = join_rows([ended, one("b-1", 2)])
    assert joined.info["final_obs"].tolist() == [[8, 8], [2, 2]]
    assert joined.info["_final_obs"].tolist() == [True, False]


def test_answers_are_split_to_their_workers():
    rets = [one("a-0", 1), many("b-1", 2, 3)]
    response = PolicyResponse(
        "a-0+b-1",
        action={"move": torch.arange(3), "look": (torch.arange(6).view(3, 2),)},
        value=torch.tensor([0.0, 1.0, 2.0]),
        hidden=None,
    )
    first, second = split_rows(response, rets)
    assert (first.env_id, second.env_id) == ("a-0", "b-1")
    assert first.value.shape == ()
    assert second.value.tolist() == [1, 2]
    assert second.action["look"][0].tolist() == [[2, 3], [4, 5]]
    assert first.action["move"].item() == 0
    assert first.hidden is second.hidden is None


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.zeros(2), r"has shape \(2,\)"),
        (torch.zeros(()), r"has shape \(\)"),
        (3.0, "is of type float"),
        ([1, 0, 1], "is of type list"),
        ({"deep": np.zeros(4)}, r"has shape \(4,\)"),
    ],
)
@pytest.mark.parametrize("rets", [[one("a-0", 1), many("b-1", 2, 3)], [many("a-0", 1, 2, 3)]])
def test_an_answer_without_one_entry_per_row_is_refused(value, found, rets):
    with pytest.raises(ContractError, match=rf"'value' {found}.*\[3, \.\.\.\]"):
        split_rows(PolicyResponse("x", value=value), rets)


def test_masks_of_rows_are_joined_and_false_where_a_worker_has_none():
    whole = EnvRet("a-0", np.zeros((2, 1)), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool))
    marked = EnvRet(
        "b-1", np.ones((2, 1)), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool),
        {"_lost": np.array([False, True]), "_idle": np.array([True, False])},
    )  # fmt: skip
    joined = join_rows([whole, marked])
    assert joined.info["_lost"].tolist() == [False, False, False, True]
    assert joined.info["_idle"].tolist() == [False, False, True, False]
    assert "_final_obs" not in joined.info
