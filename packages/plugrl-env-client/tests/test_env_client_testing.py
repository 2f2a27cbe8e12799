"""The conformance kit sees every fault that it names, and passes what is right."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from plugrl_env_client.envs.base_env import BaseEnv, BaseEnvConfig, Observation
from plugrl_env_client.errors import EnvContractError
from plugrl_env_client.testing import NotingAgent, check_env


class Walk(BaseEnv[BaseEnvConfig]):
    """A random walk of 4 steps; faults are switched on by name."""

    def __init__(self, fault=None, mode=AutoresetMode.DISABLED, num_envs=3):
        super().__init__(BaseEnvConfig(), num_envs)
        self.metadata = {"autoreset_mode": None if fault == "mode" else mode}
        self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.fault = fault
        self.x = np.zeros((num_envs, 1))
        self.time = np.arange(num_envs)

    def reset(self, *, seed=None, options=None):
        self.seed_rngs(None if self.fault == "unseeded" else seed)
        rows = np.asarray((options or {}).get("reset_indices", np.arange(self.num_envs)))
        if self.fault == "resets all" and options is not None:
            rows = np.arange(self.num_envs)
        self.restart(rows)
        if self.fault == "too many rows" and options is not None:
            return Observation(text=[""] * 9), {}
        return self.observe(), {}

    def restart(self, rows):
        for row in rows.tolist():
            self.x[row] = self.rngs[row].normal()
        self.time[rows] = rows

    def step(self, actions):
        self.x += actions
        self.time += 1
        ended = self.time >= 6
        rewards = np.ones(self.num_envs, np.float32)
        if self.fault == "nan reward":
            rewards[1] = np.nan
        terminated = ended.astype(float) if self.fault == "float flags" else ended
        obs, info = self.observe(after_step=True), {}
        if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP and ended.any():
            if self.fault != "no final":
                info = {"final_obs": obs, "_final_obs": ended}
            self.restart(np.flatnonzero(ended))
            obs = self.observe()
        return obs, rewards, terminated, np.zeros(self.num_envs, bool), info

    def observe(self, *, after_step=False):
        x = self.x.copy()
        if self.fault == "no observation":
            return {"x": x}
        if self.fault == "flat state":
            x = x.ravel()
        if self.fault == "nan state" and after_step:
            x[0] = np.nan
        if self.fault == "changing layout" and after_step:
            x = np.tile(x, 2)
        images = {}
        if self.fault == "float image":
            images = {"cam": np.zeros((self.num_envs, 2, 2, 3))}
        return Observation(images, {"x": x})


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_what_is_right_passes(mode):
    check_env(Walk(mode=mode))


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("mode", "autoreset_mode"),
        ("unseeded", "two resets with one seed"),
        ("resets all", "changed other rows"),
        ("too many rows", r"shows Observation\(, 9 rows\); expected an Observation of"),
        ("nan reward", "row 1 of the environment earned a reward of nan"),
        ("float flags", "terminated that is float64"),
        ("no observation", "expected an Observation"),
        ("flat state", r"state 'x' is float64 of shape \(3,\)"),
        ("nan state", "state 'x' holds a NaN"),
        ("changing layout", r"step shows states\['x'\] as .*2\], the first .* showed .*1\]"),
        ("float image", r"image 'cam' is float64"),
    ],
)
def test_a_fault_is_named(fault, complaint):
    with pytest.raises(EnvContractError, match=complaint):
        check_env(Walk(fault))


def test_a_missing_last_observation_is_named():
    with pytest.raises(EnvContractError, match="final_obs"):
        check_env(Walk("no final", AutoresetMode.SAME_STEP))


def test_the_noting_agent_answers_and_remembers():
    agent = NotingAgent(lambda obs, rows: np.ones((2, len(rows), 1)), {"action_horizon": 2})
    now = np.arange(2)
    obs = Observation(text=["a", "b"])
    assert agent.get_server_metadata() == {"action_horizon": 2}
    assert agent.infer(obs, env_indices=now, step_ids=now)["action"].shape == (2, 2, 1)
    no = np.zeros(2, bool)
    agent.feedback(obs, np.ones(2), no, no, {}, env_indices=now, step_ids=now)
    agent.reset()
    assert len(agent.requests) == len(agent.reports) == 1
    assert agent.reports[0]["steps"] is None
