"""From an rlightning configuration to the parts that the server runs.

Loads no torch until the parts are built. Knows nothing about frames.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import pathlib
from typing import TYPE_CHECKING, Any

from plugrl_server.errors import UsageError
from rlightning.config import Config, compose_main, resolve_extras
from rlightning.config.wire import WireConfig, wire_spaces
from rlightning.errors import USER_ERRORS, ConfigError, did_you_mean
from rlightning.utils.registry import BUFFERS, POLICIES, WEIGHTS, load_modules_from_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlightning.buffer import DataBuffer
    from rlightning.config import EnvConfig, MainConfig
    from rlightning.config.wire import WireSpaces
    from rlightning.policy import PolicyGroup

__all__ = ["build_buffer", "build_policies", "load_config", "spaces_of", "user_errors"]

_OF_ENGINES = ("checkpoint", "max_staleness")


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn what is wrong with a configuration into the command line's error.

    Raises:
        UsageError: with the same message.
    """
    try:
        yield
    except USER_ERRORS as error:
        raise UsageError(str(error)) from error


def load_config(name: str, overrides: Sequence[str]) -> MainConfig:
    """Return the configuration of a run.

    Args:
        name: a shipped configuration's name, or a YAML file.
        overrides: ``a.b=c``, ``group=option``, ``+new=val``, ``~key``.

    Raises:
        UsageError: it does not exist, or a key or value is wrong.
    """
    path = pathlib.Path(name)
    shipped = pathlib.Path(str(importlib.resources.files("rlightning") / "configs"))
    is_file = path.suffix in (".yaml", ".yml")
    folder, stem = (path.parent, path.stem) if is_file else (shipped, name)
    with user_errors():
        config = compose_main(folder, stem, overrides)
        if config.cluster is not None:
            raise ConfigError("--rlightning serves one process; leave `cluster:` out: ~cluster")
        load_modules_from_config(config)
        _resolve(config)
    return config


def _resolve(config: MainConfig) -> None:
    """Check further keys of the sections that are used, and fill in their defaults."""
    policy, buffer = POLICIES.get(config.policy.type), BUFFERS.get(config.buffer.type)
    for section, kind, path in (
        (config.policy, policy, "policy"),
        (config.buffer, buffer, "buffer"),
    ):
        declared = [getattr(kind, "Extras", Config)]
        resolve_extras(section, declared, path=path, owner=f"{kind.__name__}.Extras")
    resolve_extras(
        config.train,
        [getattr(policy, "TrainExtras", Config)],
        path="train",
        owner=f"{policy.__name__}.TrainExtras",
        refuse_others=False,  # keys of an engine, which this run has not, do no harm
    )
    known = {*type(config.train).model_fields, *policy.TrainExtras.model_fields, *_OF_ENGINES}
    for key in sorted(config.train.keys() - known):
        meant = did_you_mean(key, known)
        if meant:
            raise ConfigError(f"`train`: unknown key {key!r}.{meant}")


def spaces_of(section: EnvConfig) -> tuple[WireConfig, WireSpaces]:
    """Return what the environments that dial in show and take.

    Raises:
        UsageError: it is not known: ``task`` names no environment that can be made here.
    """
    with user_errors():
        keys = WireConfig.read(section)
        spaces = wire_spaces(section, keys, lambda: _task_spaces(section))
        if spaces.observation is None:
            raise ConfigError(
                f"env {section.name!r}: what clients observe is not known here. Set observation, "
                "for example {states: {obs: 17}}"
            )
        return keys, spaces


def _task_spaces(section: EnvConfig) -> tuple[Any, Any]:
    import plugrl_envs

    env = plugrl_envs.make_vec(section.task, 1, env_kwargs=section.env_kwargs.to_dict())
    try:
        return env.single_observation_space, env.single_action_space
    finally:
        env.close()


def build_policies(config: MainConfig) -> PolicyGroup:
    """Return a TRAIN and an EVAL instance as one group; networks are not built yet."""
    from rlightning.policy import PolicyGroup
    from rlightning.types import PolicyRole

    kind: Any = POLICIES.get(config.policy.type)
    weights = config.policy.weight_buffer
    store = None if weights.buffer_strategy == "None" else WEIGHTS.get(weights.type)()
    return PolicyGroup(
        [kind(config.policy, PolicyRole.TRAIN)],
        [kind(config.policy, PolicyRole.EVAL)],
        config.policy,
        weight_buffer=store,
    )


def build_buffer(config: MainConfig) -> DataBuffer:
    """Return the buffer."""
    buffer: DataBuffer = BUFFERS.get(config.buffer.type)(config.buffer, seed=config.train.seed)
    return buffer
