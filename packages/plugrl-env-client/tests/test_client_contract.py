"""What a step or a reset may return, and how whatever else it returns is named."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from plugrl_env_client.envs.base_env import BaseEnv, BaseEnvConfig, Observation
from plugrl_env_client.errors import EnvContractError
from plugrl_env_client.utils.contract import ContractWrapper

N = 3


def seen(width=2, rows=N, dtype=np.float32, name="x", images=None):
    return Observation(images, {name: np.zeros((rows, width), dtype)}, text=[""] * rows)


def right():
    """Return what a step should return, to be spoiled."""
    return [seen(), np.ones(N, np.float32), np.zeros(N, bool), np.zeros(N, bool), {}]


class Scripted(BaseEnv[BaseEnvConfig]):
    """Returns what it is told to."""

    def __init__(self, mode=AutoresetMode.DISABLED):
        super().__init__(BaseEnvConfig(), N)
        self.metadata = {"autoreset_mode": mode}
        self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.on_reset = seen(), {}
        self.on_step = tuple(right())

    def reset(self, *, seed=None, options=None):
        return self.on_reset

    def step(self, actions):
        return self.on_step


def spoiled(position, value):
    changed = right()
    changed[position] = value
    return tuple(changed)


def stepped(step, mode=AutoresetMode.DISABLED):
    env = ContractWrapper(Scripted(mode))
    env.reset()
    env.env.on_step = step
    return env.step(np.zeros((N, 1)))


def test_what_is_right_comes_out_as_arrays():
    given = (seen(), [1, 2, 3], [True, False, False], np.zeros(N, bool), {"is_success": [True] * 3})
    obs, rewards, terminated, truncated, info = stepped(given)
    assert obs is given[0]
    assert (rewards.dtype, rewards.tolist()) == (np.float64, [1, 2, 3])
    assert terminated.tolist() == [True, False, False]
    assert truncated.tolist() == [False] * 3
    assert info == {"is_success": [True] * 3}


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (seen(), r"reset returned Observation\(x.*expected the two values \(observation, info\)"),
        (None, "reset returned NoneType None; expected the two values"),
        ((seen(), {}, {}), r"reset returned 3 values \(Observation, dict, dict\)"),
        ((np.zeros((N, 2)), {}), r"reset shows float64 of shape \(3, 2\); expected an Observation"),
        ((seen(rows=2), {}), r"reset shows Observation\(.*2 rows\); expected .* of 3 rows"),
        ((seen(), []), r"reset returned an info that is list \[\]"),
        ((Observation(states={"x": [[0.0]] * N}), {}), r"state 'x' is list \[\[0\.0\].*numbers"),
        ((Observation(states={"x": np.zeros(N)}), {}), r"'x' is float64 of shape \(3,\)"),
        ((Observation({"c": np.zeros((N, 2, 2, 3))}), {}), "'c' is float64 of shape .* uint8"),
    ],
)
def test_a_reset_that_breaks_the_contract_is_named(found, complaint):
    env = ContractWrapper(Scripted())
    env.env.on_reset = found
    with pytest.raises(EnvContractError, match=complaint):
        env.reset()


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (None, "step returned NoneType None; expected the five values"),
        (tuple(right()[:4]), r"step returned 4 values .*terminated where the task is over"),
        (spoiled(0, {"states": {}}), "step shows dict .*; expected an Observation of 3 rows"),
        (spoiled(0, seen(rows=2)), r"step shows Observation\(.*2 rows\); expected"),
        (spoiled(0, seen(3)), r"states\['x'\] as float32 \[n, 3\], .* showed float32 \[n, 2\]"),
        (spoiled(0, seen(dtype=np.int64)), r"as int64 \[n, 2\], the first .* float32 \[n, 2\]"),
        (spoiled(0, seen(name="y")), r"shows states\['x'\] as nothing"),
        (
            spoiled(0, seen(images={"c": np.zeros((N, 2, 2, 3), np.uint8)})),
            r"images\['c'\] as uint8 \[n, 2, 2, 3\], the first observation showed nothing",
        ),
        (spoiled(1, None), r"rewards that are NoneType None; expected one number per row"),
        (spoiled(1, 1.0), "rewards that are float 1.0"),
        (spoiled(1, np.ones((N, 1))), r"rewards that are float64 of shape \(3, 1\)"),
        (spoiled(1, [1.0, [2.0], 3.0]), "rewards that are list"),
        (spoiled(1, [1.0, None, 3.0]), "rewards that are list"),
        (spoiled(1, np.array([0, np.nan, 0])), "row 1 of the environment earned a reward of nan"),
        (spoiled(2, np.zeros(N)), r"terminated that is float64 of shape \(3,\); expected one bool"),
        (spoiled(2, False), "terminated that is bool False"),
        (spoiled(3, np.zeros((N, 1), bool)), r"truncated that is bool of shape \(3, 1\)"),
        (spoiled(3, None), "truncated that is NoneType None"),
        (spoiled(4, None), "step returned an info that is NoneType None; expected a map"),
        (spoiled(4, {"is_success": True}), r"info\['is_success'\] is bool True; expected one bool"),
    ],
)
def test_a_step_that_breaks_the_contract_is_named(found, complaint):
    with pytest.raises(EnvContractError, match=complaint):
        stepped(found)


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"final_obs": seen()},
        {"final_obs": {}, "_final_obs": np.ones(N, bool)},
        {"final_obs": seen(), "_final_obs": np.ones(N)},
        {"final_obs": seen(), "_final_obs": np.ones(2, bool)},
        {"final_obs": seen(), "_final_obs": np.zeros(N, bool)},
    ],
)
def test_rows_that_reset_themselves_must_show_their_last_observation(info):
    step = (*spoiled(2, np.array([False, True, False]))[:4], info)
    with pytest.raises(EnvContractError, match=r"rows \[1\] ended .* info\['final_obs'\]"):
        stepped(step, AutoresetMode.SAME_STEP)


def test_a_last_observation_looks_like_the_others():
    info = {"final_obs": seen(5), "_final_obs": np.ones(N, bool)}
    step = (*spoiled(2, np.ones(N, bool))[:4], info)
    with pytest.raises(EnvContractError, match=r"info\['final_obs'\] shows states\['x'\] as"):
        stepped(step, AutoresetMode.SAME_STEP)


def test_a_partial_reset_shows_these_rows_or_all():
    env = ContractWrapper(Scripted())
    env.reset()
    for rows in (1, N):
        env.env.on_reset = seen(rows=rows), {}
        assert len(env.reset(options={"reset_indices": np.array([2])})[0]) == rows
    env.env.on_reset = seen(rows=2), {}
    with pytest.raises(EnvContractError, match=r"\[2\]}\) shows .* of 1 rows or of all 3 rows"):
        env.reset(options={"reset_indices": np.array([2])})


def test_an_observation_needs_one_number_of_rows():
    with pytest.raises(EnvContractError, match="one common leading axis"):
        Observation(states={"x": np.zeros((2, 1)), "y": np.zeros((3, 1))})
