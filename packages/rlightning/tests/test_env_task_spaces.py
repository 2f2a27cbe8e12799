"""Several tasks in one run: what one policy sees of them, and what each environment gets."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from plugrl_envs.testing import SpaceEnv
from rlightning.config import EnvConfig, MultitaskConfig
from rlightning.env import BaseEnv, EnvGroup, EnvMeta
from rlightning.env.task_spaces import TaskSpaces, same_form, task_names
from rlightning.errors import ConfigError, UnknownNameError
from rlightning.types import BatchedData, EnvRet, PolicyResponse

SHORT = spaces.Box(-1.0, 1.0, (2,), np.float32)
LONG = spaces.Box(-3.0, 5.0, (4,), np.float32)


class Shown(SpaceEnv):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  # Gymnasium's way

    def __init__(self, render_mode=None, **kwargs):
        super().__init__(**kwargs)
        self.render_mode = render_mode

    def render(self):
        return np.zeros((4, 4, 3), np.uint8)


gym.register("test-tasks/Space-v0", entry_point=Shown)


def metas(*pairs):
    return [EnvMeta(observation_space=see, action_space=act) for see, act in pairs]


def common(*pairs, pad=True, task_id=False):
    options = MultitaskConfig(pad_spaces=pad, task_id=task_id)
    names = [f"task{index}" for index in range(len(pairs))]
    return TaskSpaces.of(names, metas(*pairs), options)


def fits(*pairs, **options):
    both = common(*pairs, **options)
    return [both.fit(f"task{index}", *pair) for index, pair in enumerate(pairs)]


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["walk", "run"], ["walk", "run"]),
        (["arm", "arm", "leg"], ["arm_1", "arm_2", "leg"]),
        (["arm", "arm_1", "arm"], ["arm_2", "arm_1", "arm_3"]),
        (["ALE/Pong-v5", "ALE/Pong-v5"], ["ALE-Pong-v5_1", "ALE-Pong-v5_2"]),
    ],
)
def test_tasks_are_called_by_name_and_numbered_where_names_are_shared(names, expected):
    assert task_names(names) == expected


# ---- spaces --------------------------------------------------------------------------------------


def test_equal_spaces_stay_as_they_are():
    both = common((SHORT, spaces.Discrete(3)), (SHORT, spaces.Discrete(3)), pad=False)
    assert both.observation_space == SHORT
    assert both.action_space == spaces.Discrete(3)
    assert not both.masks_actions


def test_boxes_that_differ_in_their_bounds_can_be_observed_by_one_policy():
    wide = spaces.Box(-9.0, 9.0, (2,), np.float32)
    assert same_form(SHORT, wide)
    assert same_form(spaces.Dict(a=SHORT), spaces.Dict(a=wide))
    assert same_form(spaces.Tuple([SHORT]), spaces.Tuple([wide]))
    assert not same_form(spaces.Dict(a=SHORT), spaces.Dict(b=SHORT))
    assert not same_form(SHORT, spaces.Box(0, 255, (2,), np.uint8))
    assert common((SHORT, spaces.Discrete(2)), (wide, spaces.Discrete(2)), pad=False)


def test_vectors_are_padded_to_the_longest_and_the_space_holds_the_zeros():
    offset = spaces.Box(2.0, 3.0, (4,), np.float32)
    both = common((SHORT, LONG), (offset, LONG))
    space = both.observation_space
    assert space.shape == (4,)
    assert space.low.tolist() == [-1.0, -1.0, 0.0, 0.0]
    assert space.high.tolist() == [3.0] * 4
    assert space.dtype == np.float32


def test_what_is_told_beside_stands_in_a_dict():
    both = common((SHORT, spaces.Discrete(2)), (LONG, spaces.Discrete(3)), task_id=True)
    assert both.action_space == spaces.Discrete(3)
    assert dict(both.observation_space) == {
        "observation": both.observation,
        "action_mask": spaces.MultiBinary(3),
        "task": spaces.Discrete(2),
    }


IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("one", "other", "pad", "words"),
    [
        ((SHORT, SHORT), (LONG, SHORT), False, "set multitask.pad_spaces: true"),
        ((SHORT, SHORT), (SHORT, LONG), False, "set multitask.pad_spaces: true"),
        ((SHORT, SHORT), (IMAGE, SHORT), True, "pads vectors"),
        ((SHORT, SHORT), (SHORT, spaces.Discrete(2)), True, "of actions, Discrete ones"),
        ((SHORT, SHORT), (SHORT, spaces.MultiBinary(2)), True, "train a policy for each"),
    ],
)
def test_a_refusal_names_both_tasks_both_spaces_and_what_to_do(one, other, pad, words):
    with pytest.raises(ConfigError) as refusal:
        common(one, other, pad=pad)
    text = str(refusal.value)
    kind = 0 if one[0] is not other[0] else 1
    for part in ("'task0'", "'task1'", str(one[kind]), str(other[kind]), "wrappers", words):
        assert part in text


def test_an_environment_that_has_changed_since_is_refused():
    both = common((SHORT, spaces.Discrete(2)), (LONG, spaces.Discrete(3)))
    for see, act in [(IMAGE, spaces.Discrete(2)), (LONG, spaces.Discrete(4)), (LONG, LONG)]:
        with pytest.raises(ConfigError, match="does evaluate_cfg change"):
            both.fit("task0", see, act)


# ---- translation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_observations_get_zeros_behind_rows_or_none(make):
    short, long = fits((SHORT, SHORT), (LONG, SHORT))
    one = make([0.5, 1.0])
    rows = make([[0.5, 1.0], [2.0, 3.0]])
    assert short.observation(one, None).tolist() == [0.5, 1.0, 0.0, 0.0]
    assert short.observation(rows, 2).tolist() == [[0.5, 1.0, 0.0, 0.0], [2.0, 3.0, 0.0, 0.0]]
    assert short.observation(rows, 2).dtype == rows.dtype
    four = make([1.0, 2.0, 3.0, 4.0])
    assert long.observation(four, None) is four, "nothing is copied that fits"


def test_masks_and_tasks_have_the_axes_of_the_rows():
    few, many = fits((SHORT, spaces.Discrete(2)), (SHORT, spaces.Discrete(3)), task_id=True)
    one = few.observation(np.zeros(2), None)
    assert (one["action_mask"].tolist(), one["task"].shape, int(one["task"])) == ([1, 1, 0], (), 0)
    rows = many.observation(np.zeros((2, 2)), 2)
    assert rows["action_mask"].tolist() == [[1, 1, 1]] * 2
    assert rows["task"].tolist() == [1, 1]
    assert many.common.observation_space.contains(
        {**many.observation(np.zeros(2, np.float32), None), "task": 1}
    )


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_an_environment_gets_its_own_part_of_an_action_in_its_own_range(make):
    """[-1, 1] of the short one is [-3, 5] of both: 1 is the middle, 3 three quarters."""
    short, long = fits((SHORT, SHORT), (SHORT, LONG))
    action = make([[1.0, 3.0, 4.0, 5.0]], dtype=(torch if make is torch.tensor else np).float32)
    assert short.own_action(action).tolist() == [[0.0, 0.5]]
    assert short.own_action(action[0]).tolist() == [0.0, 0.5]
    assert long.own_action(action) is action
    executed = short.common_action(np.array([[0.0, 0.5]], np.float32))
    assert executed.tolist() == [[1.0, 3.0, 0.0, 0.0]]


def test_unbounded_actions_are_not_stretched():
    free = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    short, _ = fits((SHORT, SHORT), (SHORT, free))
    assert short.own_action(np.array([5.0, -7.0, 1.0])).tolist() == [5.0, -7.0]


def test_discrete_actions_count_from_each_environment_s_start():
    shifted, plain = fits((SHORT, spaces.Discrete(2, start=5)), (SHORT, spaces.Discrete(2)))
    assert shifted.own_action(np.array([0, 1])).tolist() == [5, 6]
    assert shifted.common_action(np.array([5, 6])).tolist() == [0, 1]
    assert plain.own_action(1) == 1
    assert not plain.common.masks_actions


# ---- a group -------------------------------------------------------------------------------------


def entry(name, see, act, *, num_envs=1, multitask=None, **kwargs):
    kwargs = {"observation_space": see, "action_space": act, **kwargs}
    config = EnvConfig(
        name=name,
        backend="gymnasium",
        task="test-tasks/Space-v0",
        num_envs=num_envs,
        env_kwargs=kwargs,
        vectorization="sync",
    )
    config.attach_multitask(multitask or MultitaskConfig(pad_spaces=True, task_id=True))
    return config


def answer(group, actions):
    responses = [
        PolicyResponse(env_id, action=action, value=7)
        for env_id, action in zip(group.env_ids, actions, strict=True)
    ]
    return group.step(BatchedData(group.env_ids, responses))[0].values()


def received(env):
    return env.env.call("received")


def two_tasks():
    group = EnvGroup([entry("a", SHORT, SHORT, num_envs=2), entry("b", LONG, LONG)])
    return group, group.init(seed=0)


def test_a_group_shows_one_pair_of_spaces_and_pads_the_last_observations_too():
    group, seen = two_tasks()
    assert [meta.observation_space for meta in seen] == group.get_observation_spaces()
    assert [meta.action_space.shape for meta in seen] == [(4,), (4,)]
    assert all(meta.masked_actions for meta in seen)
    for _ in range(4):
        one, two = answer(group, [np.full((2, 4), 1.0, np.float32), np.ones(4, np.float32)])
    assert one.last_truncated.all()
    final = one.info["final_obs"]
    assert final["observation"].shape == (2, 4)
    assert (final["observation"][:, 2:] == 0).all()
    assert final["observation"][:, :2].any()
    assert final["action_mask"].tolist() == [[1, 1, 0, 0]] * 2
    assert final["task"].tolist() == [0, 0]
    assert two.info["final_obs"]["observation"].shape == (4,)
    assert two.observation["action_mask"].tolist() == [1, 1, 1, 1]
    assert two.observation["task"] == 1


def test_an_environment_sees_nothing_of_the_padded_part():
    group, _ = two_tasks()
    noise = np.array([[1, 1, 99, -99], [1, 1, 0, 0]], np.float32)
    answer(group, [noise, np.zeros(4, np.float32)])
    first, second = received(group.env_list[0])
    assert first[0].tolist() == second[0].tolist() == [0.0, 0.0]
    assert received(group.env_list[1])[0][0].tolist() == [0, 0, 0, 0]


class Corrected(BaseEnv):
    """A person does something else than the policy said; then the worker dies and comes back."""

    def get_observation_space(self):
        return SHORT

    def get_action_space(self):
        return SHORT

    def reset(self):
        return EnvRet(self.env_id, np.zeros(2, np.float32), np.float32(0), np.False_, np.False_)

    def step(self, policy_resp):
        self.got = policy_resp
        info = {"executed_action": np.array([1.0, -1.0], np.float32), "_lost": np.True_}
        env_ret = self.reset()
        env_ret.info = info
        return env_ret


def test_what_a_person_did_is_stored_in_the_policy_s_own_form():
    config = EnvConfig(name="c", backend=f"{__name__}:Corrected", task="c")
    config.attach_multitask(MultitaskConfig(pad_spaces=True))
    group = EnvGroup([config, entry("b", LONG, LONG)])
    group.init(seed=0)
    asked = np.array([1.0, 1.0, 4.0, 4.0], np.float32)
    env_ret = answer(group, [asked, asked])[0]
    assert group.env_list[0].got.action.tolist() == [0.0, 0.0]
    assert group.env_list[0].got.value == 7, "other fields are the worker's as they are"
    assert env_ret.info["executed_action"].tolist() == [5.0, -3.0, 0.0, 0.0]
    assert env_ret.info["_lost"]


def test_evaluation_and_recording_see_what_training_sees():
    group, seen = two_tasks()
    assert group.for_evaluation().init(seed=1)[0].observation_space == seen[0].observation_space
    for task, position in (("b", 1), ("a", 0)):
        one = group.for_recording("rgb_array", task)
        (meta,) = one.init(seed=1)
        assert meta.observation_space == seen[0].observation_space
        observation = one.first_env_rets.values()[0].observation
        assert observation["task"] == position
    with pytest.raises(UnknownNameError, match="'c'"):
        group.for_recording("rgb_array", "c")


def test_recording_knows_all_tasks_also_before_the_first_reset():
    group = EnvGroup([entry("a", SHORT, SHORT), entry("b", LONG, LONG)])
    (meta,) = group.for_recording("rgb_array").init()
    assert meta.observation_space["observation"].shape == (4,)


def test_states_of_padded_environments_continue_their_episodes():
    def make():
        section = MultitaskConfig(pad_spaces=True)
        cart, acro = (
            EnvConfig(name=task, backend="gymnasium", task=task)
            for task in ("CartPole-v1", "Acrobot-v1")
        )
        cart.attach_multitask(section)
        acro.attach_multitask(section)
        group = EnvGroup([cart, acro])
        group.init(seed=3)
        return group

    group, other = make(), make()
    answer(group, [1, 2])
    other.set_state(group.get_state())
    for one, two in zip(answer(group, [0, 1]), answer(other, [0, 1]), strict=True):
        assert np.array_equal(one.observation["observation"], two.observation["observation"])
