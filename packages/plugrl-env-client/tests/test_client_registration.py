"""Environments are found by uid, made with what was registered, and refused when unfit."""

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from plugrl_env_client.envs.base_env import BaseEnv, BaseEnvConfig, Observation
from plugrl_env_client.envs.probe_env import ProbeEnv, ProbeEnvConfig
from plugrl_env_client.errors import EnvContractError, UnknownEnvironmentError
from plugrl_env_client.utils import registration
from plugrl_env_client.utils.registration import (
    get_env_config,
    get_env_spec,
    make,
    make_vec,
    register_env,
    register_env_config,
)


@pytest.fixture(autouse=True)
def own_registries(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registration, "REGISTERED_ENVS", dict(registration.REGISTERED_ENVS))
    configs = dict(registration.REGISTERED_ENV_CONFIGS)
    monkeypatch.setattr(registration, "REGISTERED_ENV_CONFIGS", configs)
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    monkeypatch.setattr(gym, "registry", gym.envs.registration.registry)


@dataclasses.dataclass
class TinyConfig(BaseEnvConfig):
    width: int = 2


class Tiny(BaseEnv[TinyConfig]):
    """Ends never; remembers what it was made and stepped with."""

    def __init__(self, config, num_envs=1, process_id=None, total_processes=None, gain=1.0):
        super().__init__(config, num_envs, process_id, total_processes)
        self.single_action_space = spaces.Box(-1, 1, (config.width,), np.float32)
        self.gain = gain
        self.received = None

    def reset(self, *, seed=None, options=None):
        return self.observe(), {}

    def step(self, actions):
        self.received = actions
        no = np.zeros(self.num_envs, np.bool_)
        return self.observe(), np.full(self.num_envs, self.gain), no, no, {}

    def observe(self):
        return Observation(states={"x": np.zeros((self.num_envs, 1))})


def register(uid="Tiny-v1", cls=Tiny, **options):
    register_env(uid, **options)(cls)
    register_env_config(uid)(TinyConfig)


def test_a_uid_is_found_whatever_its_case():
    assert get_env_spec("mujoco-v1").uid == "MuJoCo-v1"
    assert type(get_env_config("probe-V1")) is ProbeEnvConfig


def test_an_unknown_uid_is_answered_with_a_close_one():
    with pytest.raises(UnknownEnvironmentError, match=r"Did you mean 'Probe-v1'\?.*Known: A"):
        get_env_spec("prope-v1")


def test_options_are_copies():
    get_env_config("probe-v1").action_dim = 99
    assert get_env_config("probe-v1").action_dim == 3


def test_a_uid_is_taken_once_unless_overridden():
    register()
    with pytest.raises(KeyError, match="already"):
        register_env("Tiny-v1")(type("Other", (Tiny,), {}))
    with pytest.raises(KeyError, match="already"):
        register_env_config("Tiny-v1")(type("OtherConfig", (TinyConfig,), {}))
    other = register_env("Tiny-v1", override=True)(type("Other", (Tiny,), {}))
    assert get_env_spec("tiny-v1").cls is other


def test_what_is_no_vector_environment_is_refused():
    with pytest.raises(TypeError, match="expected a subclass of BaseEnv"):
        register_env("Bad-v1")(int)
    with pytest.raises(TypeError, match="JSON"):
        register_env("Bad-v1", hook=object())


def test_registered_keyword_arguments_reach_the_class():
    register(gain=2.5)
    env = make("tiny-v1")
    env.reset()
    assert env.step(np.zeros((1, 2)))[1].tolist() == [2.5]


def test_options_are_required():
    register_env("Bare-v1")(Tiny)
    with pytest.raises(EnvContractError, match="register_env_config"):
        make_vec("bare-v1", 1)


def test_processes_are_told_only_where_asked():
    register()
    env = make_vec("tiny-v1", 2, process_id=1, total_processes=4)
    assert (env.unwrapped.process_id, env.unwrapped.total_processes) == (1, 4)
    assert make_vec("tiny-v1", 2).unwrapped.process_id is None


@pytest.mark.parametrize(
    ("argument", "option", "registered", "expected"),
    [(2, 3, 4, 2), (None, 3, 4, 3), (None, None, 4, 4)],
)
def test_the_nearest_time_limit_counts(argument, option, registered, expected):
    register(max_episode_steps=registered)
    config = TinyConfig(max_episode_steps=option)
    env = make_vec("tiny-v1", 1, config=config, max_episode_steps=argument)
    env.reset()
    truncated = [bool(env.step(np.zeros((1, 2)))[3][0]) for _ in range(expected)]
    assert truncated == [False] * (expected - 1) + [True]


def test_actions_are_clipped_to_the_space_and_converted():
    register()
    env = make_vec("tiny-v1", 2)
    env.reset()
    env.step(np.array([[0.5, -7.0], [9.0, 0.0]]))
    received = env.unwrapped.received
    assert received.tolist() == [[0.5, -1.0], [1.0, 0.0]]
    assert received.dtype == np.float32


def test_an_environment_that_resets_itself_must_limit_itself():
    resets = type("Resets", (Tiny,), {"metadata": {"autoreset_mode": AutoresetMode.SAME_STEP}})
    register("Resets-v1", resets)
    make_vec("resets-v1", 1)
    with pytest.raises(EnvContractError, match="limits_episodes"):
        make_vec("resets-v1", 1, max_episode_steps=5)


def test_an_undeclared_reset_or_action_space_is_refused():
    register("Mute-v1", type("Mute", (Tiny,), {"metadata": {}}))
    with pytest.raises(EnvContractError, match="autoreset mode None"):
        make_vec("mute-v1", 1)

    class Spaceless(Tiny):
        def __init__(self, config, num_envs=1):
            super().__init__(config, num_envs)
            self.single_action_space = None

    register_env("Spaceless-v1")(Spaceless)
    register_env_config("Spaceless-v1")(TinyConfig)
    with pytest.raises(EnvContractError, match="single_action_space"):
        make_vec("spaceless-v1", 1)


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="num_envs is 0"):
        make_vec("probe-v1", 0)


def test_gymnasium_makes_it_too():
    register()
    env = gym.make_vec("Tiny-v1", num_envs=3)
    assert env.unwrapped.num_envs == 3
    env.close()


def test_the_built_in_ones_are_registered_with_gymnasium():
    env = gym.make_vec("Probe-v1", num_envs=2)
    assert isinstance(env.unwrapped, ProbeEnv)
    env.close()


def test_entry_points_are_imported(monkeypatch):
    loaded = []

    class Point:
        def load(self):
            loaded.append(self)

    monkeypatch.setattr(registration, "entry_points", lambda group: [Point()] * (
        group == registration.ENTRY_POINT_GROUP))  # fmt: skip
    registration.load_entry_points()
    assert len(loaded) == 1
