"""The values that travel between stages: fields, conversions, identity, pickling."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.errors import RLightningError
from rlightning.types import (
    BatchedData,
    EnvMeta,
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
    PolicyRole,
    Processed_EnvRet_fields,
    map_leaves,
    to_device,
    to_numpy,
)


def test_importing_types_loads_no_torch():
    code = (
        "import sys, rlightning, rlightning.types, rlightning.errors, rlightning.config, "
        "rlightning.utils.registry; "
        "print(sorted({'torch', 'tensordict', 'ray', 'hydra'} & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
    assert out.stderr == ""


# ---- PolicyResponse ----------------------------------------------------------------------------


def test_response_keywords_are_attributes_and_dictionary_entries():
    response = PolicyResponse(env_id="e", action=1, extra=2)
    assert (response.env_id, response.action, response.extra) == ("e", 1, 2)
    assert response.to_dict() == {"action": 1, "extra": 2}
    assert response._fields == ("action", "extra")


def test_response_fields_can_be_added_changed_and_deleted():
    response = PolicyResponse("e", action=1)
    response.value = 3
    response.action = 2
    assert response.to_dict() == {"action": 2, "value": 3}
    del response.value
    assert response.to_dict() == {"action": 2}
    with pytest.raises(AttributeError):
        del response.value


def test_response_dictionary_is_a_copy():
    response = PolicyResponse("e", action=1)
    response.to_dict()["action"] = 5
    assert response.action == 1


def test_response_needs_an_env_id():
    with pytest.raises(TypeError):
        PolicyResponse(action=1)


def test_response_missing_field_names_those_it_has():
    with pytest.raises(AttributeError, match=r"no field 'valeu'; it has: action, value"):
        PolicyResponse("e", action=1, value=2).valeu  # noqa: B018


@pytest.mark.parametrize("kind", [PolicyResponse, MultiAgentPolicyResponse])
def test_response_pickles_and_copies(kind):
    response = kind("e", action=np.arange(3), log_prob=torch.ones(2))
    for twin in (pickle.loads(pickle.dumps(response)), copy.deepcopy(response)):
        assert type(twin) is kind
        assert twin.env_id == "e"
        assert list(twin.to_dict()) == ["action", "log_prob"]
        assert twin.action.tolist() == [0, 1, 2]
        assert twin.ts_policy_sent_ns == response.ts_policy_sent_ns
    shallow = copy.copy(response)
    shallow.action = 7
    assert response.action.tolist() == [0, 1, 2]


def test_response_cloudpickles():
    cloudpickle = pytest.importorskip("cloudpickle")
    twin = pickle.loads(cloudpickle.dumps(PolicyResponse("e", action=4)))
    assert twin.to_dict() == {"action": 4}


def test_response_converts_in_place_and_returns_itself():
    response = PolicyResponse("e", action=np.zeros(2, np.float32), text="kept")
    assert response.cpu() is response
    assert isinstance(response.action, torch.Tensor)
    assert response.numpy() is response
    assert isinstance(response.action, np.ndarray)
    assert response.text == "kept"


def test_response_latency_is_from_its_own_stamp_and_never_negative():
    response = PolicyResponse("e").mark_policy_sent()
    assert response.compute_sent_latency(response.ts_policy_sent_ns + 2_500_000_000) == 2.5
    assert response.compute_sent_latency(response.ts_policy_sent_ns - 1) == 0.0
    assert response.compute_sent_latency() >= 0.0


def test_response_example_is_inside_the_space():
    space = gym.spaces.Box(-1, 1, (3,))
    assert space.contains(PolicyResponse.make_example(space, value=0).action)
    many = MultiAgentPolicyResponse.make_example({"a": space, "b": gym.spaces.Discrete(2)}, "x-1")
    assert many.env_id == "x-1"
    assert space.contains(many.action["a"])


# ---- EnvRet ------------------------------------------------------------------------------------


def test_env_ret_defaults_and_field_names():
    ret = EnvRet("e-0", observation=1)
    assert (ret.last_reward, ret.last_terminated, ret.last_truncated) == (0.0, False, False)
    assert (ret.info, ret._extra) == ({}, {})
    assert EnvRet.fields() == (
        "observation",
        "last_reward",
        "last_terminated",
        "last_truncated",
        "info",
    )
    assert EnvRet.get_defaults() == {
        "last_reward": 0.0,
        "last_terminated": False,
        "last_truncated": False,
    }
    assert Processed_EnvRet_fields == (
        "next_observation",
        "reward",
        "terminated",
        "truncated",
        "info",
    )


def test_env_ret_extras_are_merged_and_clashes_refused():
    ret = EnvRet("e", 1, _extra={"goal": 3})
    assert ret.to_dict() == {
        "observation": 1,
        "last_reward": 0.0,
        "last_terminated": False,
        "last_truncated": False,
        "info": {},
        "goal": 3,
    }
    with pytest.raises(KeyError, match="last_reward"):
        EnvRet("e", 1, _extra={"last_reward": 3}).to_dict()


def test_env_ret_converts_nested_leaves_into_a_new_value():
    observation = {"image": np.zeros((2, 2), np.uint8), "parts": [np.ones(1), (np.ones(2), "text")]}
    ret = EnvRet("e", observation, _extra={"x": np.ones(1)})
    moved = ret.cpu()
    assert moved is not ret
    assert isinstance(ret.observation["image"], np.ndarray)
    assert moved.observation["image"].dtype == torch.uint8
    assert isinstance(moved.observation["parts"][1], tuple)
    assert moved.observation["parts"][1][1] == "text"
    assert isinstance(moved._extra["x"], torch.Tensor)
    assert moved.ts_env_sent_ns == ret.ts_env_sent_ns
    back = moved.numpy()
    assert back.observation["parts"][1][0].tolist() == [1.0, 1.0]


def test_env_ret_latency_is_in_seconds():
    ret = EnvRet("e", 1).mark_env_sent()
    assert ret.compute_sent_latency(ret.ts_env_sent_ns + 1_500_000_000) == 1.5
    assert ret.compute_sent_latency(0) == 0.0


def test_env_rets_with_arrays_compare_and_hash_without_raising():
    one, two = EnvRet("e", np.zeros(3)), EnvRet("e", np.zeros(3))
    assert one == one
    assert one != two
    assert {one: 1, two: 2}[one] == 1
    assert hash(one) == hash("e")
    many = MultiAgentEnvRet("e", {"a": np.zeros(2)}, last_reward={"a": 1.0})
    assert {many: 1}[many] == 1
    assert type(many.cpu()) is MultiAgentEnvRet


# ---- conversions -------------------------------------------------------------------------------


def test_sixteen_bit_unsigned_survives_both_ways():
    array = np.array([0, 1, 40_000, 65_535], np.uint16)
    tensor = to_device(array, "cpu")
    assert tensor.dtype == torch.uint16
    assert to_numpy(tensor).dtype == np.uint16
    assert to_numpy(tensor).tolist() == [0, 1, 40_000, 65_535]


def test_bfloat16_survives_the_numpy_hop_exactly():
    bits = torch.arange(-(2**15), 2**15, 7, dtype=torch.int16)
    tensor = bits.view(torch.bfloat16)
    tensor = tensor[~tensor.isnan()]
    array = to_numpy(tensor)
    assert array.dtype == np.float32
    back = torch.from_numpy(array).bfloat16()
    assert torch.equal(back.view(torch.int16), tensor.view(torch.int16))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int64", "float16", "float32", "float64"]
)
def test_dtypes_survive_both_ways(dtype):
    array = np.array([0, 1, 1], dtype)
    assert to_numpy(to_device(array, "cpu")).dtype == array.dtype


def test_arrays_that_torch_cannot_wrap_are_copied():
    read_only = np.arange(3.0)
    read_only.flags.writeable = False
    assert to_device(read_only, "cpu").tolist() == [0, 1, 2]
    assert to_device(np.arange(3.0)[::-1], "cpu").tolist() == [2, 1, 0]
    assert to_device(np.arange(3, dtype=">i4"), "cpu").tolist() == [0, 1, 2]


def test_cpu_arrays_are_shared_not_copied():
    array = np.zeros(2)
    to_device(array, "cpu")[0] = 5
    assert array[0] == 5


def test_numpy_scalars_become_tensors_and_python_numbers_stay():
    assert to_device(np.float32(1.5), "cpu").dtype == torch.float32
    assert to_device(3, "cpu") == 3
    assert to_device(np.str_("a"), "cpu") == "a"
    assert to_device(np.array(["a"], dtype=object), "cpu").dtype == object


def test_gradients_are_dropped_on_the_way_to_numpy():
    assert to_numpy(torch.ones(1, requires_grad=True)).tolist() == [1.0]


def test_named_tuples_keep_their_type():
    from collections import namedtuple

    Pair = namedtuple("Pair", "left right")
    doubled = map_leaves(lambda leaf: leaf * 2, Pair(1, [2]))
    assert doubled == Pair(2, [4])
    assert type(doubled) is Pair


# ---- BatchedData, EnvMeta, PolicyRole -----------------------------------------------------------


def test_batched_data_keeps_order_and_duplicates():
    batch = BatchedData(["b", "a", "b"], [1, 2, 3])
    assert batch.ids() == ("b", "a", "b")
    assert batch.values() == (1, 2, 3)
    assert list(batch) == list(batch.items()) == [("b", 1), ("a", 2), ("b", 3)]
    assert len(batch) == 3
    assert batch["b"] == 1


def test_batched_data_from_a_dictionary():
    batch = BatchedData.from_dict({"x": 1, "y": 2})
    assert list(batch) == [("x", 1), ("y", 2)]


def test_batched_data_of_unequal_lengths_is_refused():
    with pytest.raises(ValueError, match="2 ids for 1 values"):
        BatchedData(["a", "b"], [1])


def test_batched_data_unknown_id_is_a_key_error_that_suggests():
    with pytest.raises(KeyError) as caught:
        BatchedData(["env-0"], [1])["env-1"]
    assert str(caught.value) == "'env-1' is not in the batch. Did you mean 'env-0'? Known: env-0."
    assert isinstance(caught.value, RLightningError)


def test_roles_compare_with_plain_strings_and_refuse_others():
    assert PolicyRole("train") is PolicyRole.TRAIN == "train"
    assert PolicyRole("eval") is PolicyRole.EVAL == "eval"
    with pytest.raises(ValueError, match="critic"):
        PolicyRole("critic")


def test_env_meta_is_empty_by_default():
    meta = EnvMeta()
    assert (meta.env_id, meta.action_space, meta.observation_space, meta.num_envs) == (
        None,
        None,
        None,
        None,
    )


def arrays_only(n=2):
    return EnvRet(
        "a-0", np.ones((n, 3), np.float32), np.arange(n, dtype=np.float32), np.zeros(n, bool),
        np.ones(n, bool), {"x": np.arange(n, dtype=np.float64)},
    )  # fmt: skip


def test_an_env_ret_of_arrays_becomes_one_of_tensors_that_share_their_memory():
    source = arrays_only()
    moved = source.to("cpu")
    assert isinstance(moved, EnvRet)
    assert hash(moved) == hash(source)
    source.last_reward[0] = 7.0
    for field in ("observation", "last_reward", "last_terminated", "last_truncated"):
        assert isinstance(getattr(moved, field), torch.Tensor)
        assert np.array_equal(getattr(moved, field).numpy(), getattr(source, field))
        assert getattr(moved, field) is getattr(moved, field)
    assert moved.info["x"].dtype == torch.float64
    moved.info["y"] = 1
    assert "y" not in source.info
    assert list(moved.to_dict()) == list(source.to_dict())
    assert moved.ts_env_sent_ns == source.ts_env_sent_ns


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_an_env_ret_of_shared_tensors_copies_and_pickles(copied):
    twin = copied(arrays_only().to("cpu"))
    assert type(twin) is EnvRet
    assert torch.equal(twin.last_reward, torch.tensor([0.0, 1.0]))
    assert twin.info["x"].tolist() == [0.0, 1.0]


def test_fields_of_an_env_ret_of_shared_tensors_can_be_set_and_replaced():
    moved = arrays_only().to("cpu")
    moved.last_reward = 5.0
    assert moved.last_reward == 5.0
    replaced = dataclasses.replace(moved, env_id="b-1")
    assert (replaced.env_id, replaced.last_reward) == ("b-1", 5.0)
    assert isinstance(replaced.last_truncated, torch.Tensor)
    assert isinstance(moved.numpy().last_truncated, np.ndarray)


def test_asking_for_a_key_of_the_info_moves_nothing():
    zeros = np.zeros(2)
    shared = EnvRet("a", zeros, zeros, zeros, zeros, {"final_obs": zeros}).to("cpu")
    assert shared.has_info("final_obs")
    assert not shared.has_info("_final_obs")
    assert "info" not in vars(shared)
    shared.info["_final_obs"] = torch.zeros(2)
    assert shared.has_info("_final_obs")
    assert EnvRet("a", 0, info={"x": 1}).has_info("x")
