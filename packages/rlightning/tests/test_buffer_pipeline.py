"""The replaceable stages from rows to transitions, and the helpers beside them."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import rlightning.buffer.utils as public
from rlightning.buffer import DataBuffer, ReplayBuffer, RolloutBuffer
from rlightning.buffer.utils.preprocessors import (
    BoxFlattenPreprocessor,
    DiscretePreprocessor,
    NonPreprocessor,
    default_obs_preprocessor,
    default_reward_preprocessor,
    get_preprocessor_cls,
)
from rlightning.buffer.utils.utils import (
    default_compute_gae,
    default_env_ret_preprocess_fn,
    default_gae_no_loop,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
)
from rlightning.config import BufferConfig
from rlightning.errors import ContractError
from rlightning.ops.returns import gae
from rlightning.types import EnvMeta, EnvRet, PolicyResponse

SPACE = gym.spaces.Dict(
    {"image": gym.spaces.Box(0, 255, (2, 2), np.uint8), "pose": gym.spaces.Box(-1, 1, (3,))}
)


def make(kind=RolloutBuffer, *, num_envs=1, space=SPACE, keys=None, **stages):
    config = BufferConfig(type=kind.__name__, capacity=1000, **(keys or {}))
    buffer = kind(config, **stages)
    buffer.init([EnvMeta("e-0", gym.spaces.Box(-1, 1, (2,)), space, num_envs)])
    return buffer


def play(buffer, num_envs, *, steps=40, seed=0, nested=True, action_axis=True, end=True):
    """Add the same random rows to any buffer."""
    rng = np.random.default_rng(seed)
    lead = (num_envs,) if num_envs > 1 else ()
    answer_lead = lead if num_envs > 1 else (1,) * action_axis

    def observe():
        pose = rng.normal(size=(*lead, 3)).astype(np.float32)
        image = rng.integers(255, size=(*lead, 2, 2), dtype=np.uint8)
        return {"image": image, "pose": pose} if nested else pose

    for row in range(steps + 1):
        terminated, truncated = rng.random(lead) < 0.1, rng.random(lead) < 0.1
        over = np.asarray(terminated | truncated)
        info = {"final_obs": observe(), "_final_obs": over, "note": "text"} if over.any() else {}
        env_ret = EnvRet(
            "e-0",
            observe(),
            rng.normal(size=lead),
            terminated,
            truncated,
            info,
            {"stage": over * 3},
        )
        response = PolicyResponse(
            "e-0",
            action=torch.tensor(rng.normal(size=(*answer_lead, 2))),
            value=torch.tensor(rng.normal(size=answer_lead)).float(),
            final_value=rng.normal(size=answer_lead).astype(np.float32),
        )
        buffer.add_transition("e-0", env_ret, response, end and row == steps)
    return buffer.get_all()


def assert_same(one, two):
    one, two = one.flatten_keys("."), two.flatten_keys(".")
    assert list(one.keys()) == list(two.keys())
    for name in one.keys():  # noqa: SIM118
        assert one[name].dtype == two[name].dtype, name
        assert torch.equal(one[name], two[name]), name


# ---- the row path is the slow twin of the columnar path ------------------------------------------


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_rows_through_the_default_functions_equal_columns(num_envs, nested, auto):
    keys = {"auto_truncate_episode": auto}
    by_column = make(num_envs=num_envs, keys=keys)
    by_row = make(
        num_envs=num_envs, keys=keys, postprocess_fn=lambda rows: default_postprocess_fn(rows)
    )
    assert_same(play(by_column, num_envs, nested=nested), play(by_row, num_envs, nested=nested))


def test_preprocessing_by_custom_functions_that_do_the_default_changes_nothing():
    plain = play(make(num_envs=2), 2)
    stages = [
        {"obs_preprocessor": lambda observation: observation},
        {"reward_preprocessor": lambda reward: reward},
        {"env_ret_preprocess_fn": lambda *args: default_env_ret_preprocess_fn(*args)},
        {"policy_resp_preprocess_fn": lambda *args: default_policy_resp_preprocess_fn(*args)},
        {"preprocess_fn": lambda *args: default_preprocess_fn(*args)},
    ]
    for stage in stages:
        assert_same(plain, play(make(num_envs=2, **stage), 2))
    assert_same(plain, play(make(num_envs=2, obs_preprocessor=default_obs_preprocessor), 2))


# ---- what custom stages see and do ---------------------------------------------------------------


def test_a_custom_observation_preprocessor_reaches_final_observations_too():
    buffer = make(num_envs=2, obs_preprocessor=lambda observation: observation["pose"] * 0 + 5)
    batch = play(buffer, 2)
    assert batch["observation"].unique().tolist() == [5.0]
    assert batch["next_observation"].unique().tolist() == [5.0]


def test_a_preprocessor_class_is_made_from_the_observation_space():
    box = gym.spaces.Box(0, 1, (2, 3))
    buffer = make(space=box, obs_preprocessor=BoxFlattenPreprocessor)
    for row in range(2):
        response = PolicyResponse("e-0", action=np.zeros(2))
        buffer.add_transition("e-0", EnvRet("e-0", np.ones((2, 3))), response, row == 1)
    assert buffer.get_all()["observation"].shape == (1, 6)


def test_a_custom_reward_preprocessor_scales_the_stored_reward():
    plain = play(make(DataBuffer), 1)
    scaled = play(make(DataBuffer, reward_preprocessor=lambda reward: reward * 10), 1)
    torch.testing.assert_close(scaled["reward"], plain["reward"] * 10)


def test_a_custom_response_function_chooses_what_is_stored():
    def only_the_action(row, response):
        return row | {"action": response.action}

    batch = play(make(policy_resp_preprocess_fn=only_the_action), 1)
    assert "value" not in batch.keys()  # noqa: SIM118
    assert "advantage" not in batch.keys()  # noqa: SIM118


def test_a_custom_postprocess_sees_lists_of_rows_and_decides_the_transitions():
    seen = {}

    def every_second(rows):
        seen.update(rows)
        return {
            name: value[::2]
            for name, value in default_postprocess_fn(rows).items()
            if name != "observation"
        }

    buffer = make(DataBuffer, postprocess_fn=every_second)
    batch = play(buffer, 1, nested=False, steps=10)
    assert len(seen["observation"]) == 11
    assert isinstance(seen["observation"][0], torch.Tensor)
    assert seen["action"][0].shape == (2,)
    assert len(batch) == 5
    assert "observation" not in batch.keys()  # noqa: SIM118


def test_a_postprocess_may_use_what_is_not_numbers():
    def count_notes(rows):
        out = default_postprocess_fn({name: rows[name] for name in rows if name != "note"})
        return out | {"noted": torch.tensor([note == "yes" for note in rows["note"][:-1]])}

    def with_note(row, env_ret, *rest):
        return default_preprocess_fn(row, env_ret, *rest) | {"note": "yes"}

    buffer = make(DataBuffer, preprocess_fn=with_note, postprocess_fn=count_notes)
    assert play(buffer, 1)["noted"].all()


def test_one_reward_and_flag_for_all_environments_count_for_each():
    batches = []
    for stages in ({}, {"postprocess_fn": lambda rows: default_postprocess_fn(rows)}):
        buffer = make(DataBuffer, num_envs=2, **stages)
        for row in range(3):
            env_ret = EnvRet("e-0", np.full((2, 3), row / 2), float(row))
            response = PolicyResponse("e-0", action=np.zeros((2, 2)))
            buffer.add_transition("e-0", env_ret, response, row == 2)
        batches.append(buffer.get_all())
    assert batches[0]["reward"].tolist() == [1.0, 2.0, 1.0, 2.0]
    assert_same(*batches)


def test_rows_are_copied_because_environments_reuse_their_arrays():
    buffer = make(DataBuffer, space=None, postprocess_fn=lambda rows: default_postprocess_fn(rows))
    shared = np.zeros(2, np.float32)
    for row in range(3):
        shared[:] = row
        response = PolicyResponse("e-0", action=np.zeros(2))
        buffer.add_transition("e-0", EnvRet("e-0", shared), response, row == 2)
    assert buffer.get_all()["observation"][:, 0].tolist() == [0.0, 1.0]


def test_fields_that_are_not_in_every_row_are_refused_before_the_postprocess():
    buffer = make(DataBuffer, space=None, postprocess_fn=lambda rows: default_postprocess_fn(rows))
    env_ret = EnvRet("e-0", np.zeros(2))
    buffer.add_transition("e-0", env_ret, PolicyResponse("e-0", action=np.zeros(2)))
    with pytest.raises(ValueError, match="more"):
        buffer.add_transition(
            "e-0", env_ret, PolicyResponse("e-0", action=np.zeros(2), more=1), True
        )


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ({"preprocess_fn": lambda *_: None}, "NoneType; expected the transition dictionary"),
        ({"postprocess_fn": lambda _: 3}, "mapping"),
        ({"postprocess_fn": lambda _: {"a": torch.zeros(2), "b": torch.zeros(3)}}, "lengths"),
        ({"postprocess_fn": lambda _: {"a": torch.zeros(0)}}, "lengths"),
        ({"postprocess_fn": lambda _: {"a": ["x"]}}, "numbers"),
    ],
)
def test_a_stage_that_returns_something_else_is_refused(stages, text):
    with pytest.raises(ValueError, match=text):
        play(make(**stages), 1)


def test_a_vectorised_postprocess_must_keep_the_environment_axis():
    with pytest.raises(ValueError, match=r"expected \[T, 2"):
        play(make(num_envs=2, postprocess_fn=lambda _: {"a": torch.zeros(5, 3)}), 2)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("obs_preprocessor", "env_ret_preprocess_fn"),
        ("reward_preprocessor", "env_ret_preprocess_fn"),
        ("obs_preprocessor", "preprocess_fn"),
        ("reward_preprocessor", "preprocess_fn"),
        ("env_ret_preprocess_fn", "preprocess_fn"),
        ("policy_resp_preprocess_fn", "preprocess_fn"),
    ],
)
def test_replacing_a_stage_and_its_only_caller_is_refused(one, two):
    with pytest.raises(ValueError, match=one):
        make(**{one: lambda *args: args[0], two: lambda *args: args[0]})


def test_naming_the_defaults_is_no_conflict():
    make(
        obs_preprocessor=default_obs_preprocessor,
        reward_preprocessor=default_reward_preprocessor,
        env_ret_preprocess_fn=default_env_ret_preprocess_fn,
        policy_resp_preprocess_fn=default_policy_resp_preprocess_fn,
        preprocess_fn=default_preprocess_fn,
        postprocess_fn=default_postprocess_fn,
    )


# ---- preprocessors -------------------------------------------------------------------------------


def test_a_box_is_flattened_alone_and_in_a_batch():
    flatten = BoxFlattenPreprocessor(gym.spaces.Box(0, 1, (2, 3)))
    assert flatten.shape == (6,)
    assert flatten(np.zeros((2, 3))).shape == (6,)
    assert flatten(torch.zeros(5, 2, 3)).shape == (5, 6)


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
def test_a_discrete_value_becomes_one_hot_counted_from_the_spaces_start(convert):
    one_hot = DiscretePreprocessor(gym.spaces.Discrete(3, start=2))
    assert one_hot.shape == (3,)
    assert one_hot(convert(2)).tolist() == [1.0, 0.0, 0.0]
    assert one_hot(convert([3, 4])).tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert one_hot(2).dtype == np.float32


def test_a_value_outside_a_discrete_space_is_refused():
    with pytest.raises(ValueError, match="5 is not in"):
        DiscretePreprocessor(gym.spaces.Discrete(3))(5)


def test_other_spaces_are_left_alone():
    keep = NonPreprocessor(SPACE)
    observation = {"image": np.zeros(1)}
    assert keep(observation) is observation
    assert keep.batch_transform(observation) is observation
    assert keep.shape is None
    with pytest.raises(ValueError, match="str"):
        keep("text")


def test_each_space_has_its_usual_preprocessor():
    assert get_preprocessor_cls(gym.spaces.Box(0, 1)) is BoxFlattenPreprocessor
    assert get_preprocessor_cls(gym.spaces.Discrete(2)) is DiscretePreprocessor
    assert get_preprocessor_cls(SPACE) is NonPreprocessor


# ---- advantages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_the_advantage_helpers_equal_ops_gae_and_take_flags_of_any_dtype(dtype):
    generator = torch.Generator().manual_seed(0)
    rewards, values, following = torch.randn(3, 20, 4, generator=generator)
    dones = torch.rand(20, 4, generator=generator) < 0.2
    expected = gae(
        rewards, values, following, dones, torch.zeros_like(dones), gamma=0.9, gae_lambda=0.8
    )
    for function in (default_compute_gae, default_gae_no_loop):
        found = function(rewards, values, following, dones.to(dtype), 0.9, 0.8, normalize_adv=False)
        torch.testing.assert_close(found, expected)
        advantages, returns = function(rewards, values, following, dones.to(dtype), 0.9, 0.8)
        assert advantages.mean().abs() < 1e-6
        assert abs(advantages.std(unbiased=False) - 1) < 1e-4
        torch.testing.assert_close(returns, expected[1])


def test_normalising_a_single_advantage_stays_finite():
    one = torch.ones(1, 1)
    advantages, _ = default_compute_gae(one, one, one, one.bool(), 0.9, 0.9)
    assert torch.isfinite(advantages).all()


def test_the_public_names_are_where_the_documentation_says():
    for name in ("default_compute_gae", "default_gae_no_loop", "Storage", "Preprocessor"):
        assert hasattr(public, name)


@pytest.mark.parametrize("name", ["reward", "terminated", "truncated", "next_observation", "info"])
@pytest.mark.parametrize("stages", [{}, {"reward_preprocessor": lambda reward: reward}])
def test_an_answer_never_takes_the_place_of_what_the_environment_returned(name, stages):
    buffer = make(**stages)
    response = PolicyResponse("e-0", action=np.zeros(2), **{name: 0.0})
    with pytest.raises(ContractError, match=rf"'{name}'.* names of environment fields"):
        buffer.add_transition("e-0", EnvRet("e-0", np.zeros(3), 1.0), response)


@pytest.mark.parametrize(
    ("kind", "keys", "name"),
    [
        (RolloutBuffer, {}, "advantage"),
        (RolloutBuffer, {}, "return"),
        (ReplayBuffer, {"prioritized": True}, "index"),
        (ReplayBuffer, {"prioritized": True}, "weight"),
        (ReplayBuffer, {"n_step": 3}, "discount"),
        (ReplayBuffer, {"sequence_length": 2}, "mask"),
    ],
)
def test_an_answer_with_the_name_of_what_a_buffer_makes_is_refused(kind, keys, name):
    def add(**answer):
        buffer = make(kind, space=gym.spaces.Box(-1, 1, (3,)), keys=keys)
        for step in range(5):
            response = PolicyResponse("e-0", action=np.zeros(2), **answer)
            buffer.add_transition("e-0", EnvRet("e-0", np.zeros(3)), response, truncated=step == 4)
        return buffer.sample(2)[0]

    with pytest.raises(ContractError, match=f"the policy answers {name}, which this buffer makes"):
        add(value=0.0, final_value=0.0, **{name: 7.0})
    if kind is RolloutBuffer:  # which makes none without values: then it is the policy's
        assert add(**{name: 7.0})[name].eq(7.0).all()
