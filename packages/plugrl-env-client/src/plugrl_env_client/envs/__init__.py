"""Environments: the contract, and one file per built-in family. Importing registers them."""

from plugrl_env_client.envs.atari_env import AtariEnv, AtariEnvConfig
from plugrl_env_client.envs.base_env import BaseEnv, BaseEnvConfig, Observation
from plugrl_env_client.envs.classic_env import ClassicEnv, ClassicEnvConfig
from plugrl_env_client.envs.dummy_env import DummyEnv, DummyEnvConfig
from plugrl_env_client.envs.gym_env import GymEnv, GymEnvConfig
from plugrl_env_client.envs.mujoco_env import MuJoCoEnv, MuJoCoEnvConfig
from plugrl_env_client.envs.probe_env import ProbeEnv, ProbeEnvConfig

__all__ = [
    "AtariEnv",
    "AtariEnvConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "ClassicEnv",
    "ClassicEnvConfig",
    "DummyEnv",
    "DummyEnvConfig",
    "GymEnv",
    "GymEnvConfig",
    "MuJoCoEnv",
    "MuJoCoEnvConfig",
    "Observation",
    "ProbeEnv",
    "ProbeEnvConfig",
]
