"""Registries: names in a configuration to classes, loaded only when asked for.

Three ways to name a class, all accepted wherever a registered name is:

- a registered name: a built-in, or one a module listed under ``imports:`` registered;
- an entry point of the group ``rlightning.<registry name>`` of an installed package;
- ``"pkg.module:Name"``, imported on the spot.

Knows nothing about torch or about what the classes do.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from rlightning.errors import ConfigError, DuplicateNameError, UnknownNameError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "BUFFERS",
    "ENGINE",
    "ENVS",
    "POLICIES",
    "WEIGHTS",
    "Registry",
    "load_modules_from_config",
]

T = TypeVar("T", bound=type)


class Registry:
    """Classes by name.

    Args:
        name: what the classes are, used in messages and as the entry-point group's suffix.
        builtins: name to ``"module:Class"``, imported on first use.
    """

    def __init__(self, name: str, builtins: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._builtins = dict(builtins or {})
        self.module_dict: dict[str, type] = {}
        """The classes registered or loaded so far, by name."""

    def __contains__(self, key: str) -> bool:
        """Return whether `get` knows the name, without importing anything."""
        return ":" in key or key in self.names()

    def names(self) -> list[str]:
        """Return every name that `get` accepts, sorted, without importing anything."""
        return sorted({*self.module_dict, *self._builtins, *self._entry_points()})

    def register(self, name: str | None = None) -> Callable[[T], T]:
        """Return a class decorator that registers under `name`, by default the class's own.

        Raises:
            DuplicateNameError: another class has the name already; both modules are named.
        """

        def decorate(cls: T) -> T:
            key = name or cls.__name__
            builtin = self._builtins.get(key)
            here = f"{cls.__module__}:{cls.__qualname__}"
            taken = self.module_dict.get(key)
            taken_by = f"{taken.__module__}:{taken.__qualname__}" if taken else builtin
            if taken_by is not None and taken_by != here:
                raise DuplicateNameError(
                    f"{key!r} in the {self.name} registry is {taken_by} already; "
                    f"register {here} under another name"
                )
            self.module_dict[key] = cls
            return cls

        return decorate

    def get(self, key: str) -> type[Any]:
        """Return the class called `key`.

        Raises:
            UnknownNameError: nothing has the name; close ones are suggested.
            ConfigError: ``"pkg.module:Name"`` cannot be imported.
        """
        if key in self.module_dict:
            return self.module_dict[key]
        if key in self._builtins:
            return self.module_dict.setdefault(key, _load(self._builtins[key]))
        if ":" in key:
            return _load(key)
        points = self._entry_points()
        if key in points:
            return self.module_dict.setdefault(key, points[key].load())
        raise UnknownNameError(
            key,
            kind=f"{self.name} registry",
            known=self.names(),
            hint="A class of your own is found by listing its module under `imports:`, "
            'or as "pkg.module:Name".',
        )

    def _entry_points(self) -> dict[str, Any]:
        return {point.name: point for point in entry_points(group=f"rlightning.{self.name}")}


def _load(path: str) -> type[Any]:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in (module_name, *_parents(module_name)):
            raise  # the module exists; something that it needs does not, and its error says what
        raise ConfigError(f"cannot import {path!r}: {error}") from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(
            f"{module_name} has no {attribute!r}.{did_you_mean(attribute, names)} "
            'Expected "pkg.module:Name"'
        )
    loaded = getattr(module, attribute)
    if not isinstance(loaded, type):
        raise ConfigError(f"{path!r} is a {type(loaded).__name__}; expected a class")
    return loaded


def _parents(module_name: str) -> Iterable[str]:
    parts = module_name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def load_modules_from_config(config: Any) -> None:
    """Import every module listed in ``config.imports`` so that its classes register themselves.

    Raises:
        ConfigError: a module does not exist.
    """
    for name in getattr(config, "imports", None) or []:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, *_parents(name)):
                raise
            raise ConfigError(
                f"`imports:` names the module {name!r}, which cannot be found; it must be "
                "importable from where the run starts (installed, or beside the script)"
            ) from error


BUFFERS = Registry(
    "buffer",
    {
        "DatasetBuffer": "rlightning.buffer.dataset_buffer:DatasetBuffer",
        "PriorReplayBuffer": "rlightning.buffer.prior_replay_buffer:PriorReplayBuffer",
        "ReplayBuffer": "rlightning.buffer.replay_buffer:ReplayBuffer",
        "RolloutBuffer": "rlightning.buffer.rollout_buffer:RolloutBuffer",
    },
)
WEIGHTS = Registry(
    "weights",
    {
        "WeightBuffer": "rlightning.weights.weight_buffer:WeightBuffer",
        "CPUWeightBuffer": "rlightning.weights.cpu_weight_buffer:CPUWeightBuffer",
        "ShardedWeightBuffer": "rlightning.weights.sharded_weight_buffer:ShardedWeightBuffer",
    },
)
POLICIES = Registry(
    "policy",
    {
        "A2CPolicy": "rlightning.policy.a2c_policy:A2CPolicy",
        "DQNPolicy": "rlightning.policy.dqn_policy:DQNPolicy",
        "PPOPolicy": "rlightning.policy.ppo_policy:PPOPolicy",
        "RecurrentPPOPolicy": "rlightning.policy.recurrent_ppo_policy:RecurrentPPOPolicy",
        "RLPDPolicy": "rlightning.policy.rlpd_policy:RLPDPolicy",
        "SACPolicy": "rlightning.policy.sac_policy:SACPolicy",
        "SimplePPOPolicy": "rlightning.policy.ppo_policy:PPOPolicy",
        "SimpleSupervisedPolicy": "rlightning.policy.supervised_policy:SimpleSupervisedPolicy",
        "TD3Policy": "rlightning.policy.td3_policy:TD3Policy",
        "VTracePPOPolicy": "rlightning.policy.vtrace_ppo_policy:VTracePPOPolicy",
    },
)
ENVS = Registry(
    "env",
    {
        "gymnasium": "rlightning.env.gym_env:GymEnv",
        "mujoco": "rlightning.env.gym_env:GymEnv",
        "ale": "rlightning.env.gym_env:GymEnv",
        "env_server": "rlightning.env.remote_env:RemoteEnv",
    },
)
ENGINE = Registry(
    "engine",
    {
        "asyncrl": "rlightning.engine.async_rl:AsyncRLEngine",
        "async_rsl": "rlightning.engine.async_rsl_rl:AsyncRSLRLEngine",
        "eval": "rlightning.engine.evaluation_engine:EvaluationEngine",
        "rsl": "rlightning.engine.rsl_rl:RSLRLEngine",
        "supervised": "rlightning.engine.supervised:SupervisedEngine",
        "syncrl": "rlightning.engine.sync_rl:SyncRLEngine",
    },
)
