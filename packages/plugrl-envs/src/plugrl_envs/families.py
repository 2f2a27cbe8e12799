"""Which simulator family an id belongs to, and what must be imported before it can be made.

Every family is optional; one that is missing is reported with the extra that brings it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from plugrl_envs.errors import MissingExtraError, UnknownEnvError
from plugrl_envs.quiet import quiet_mujoco

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["prepare", "prepare_simulator"]


def prepare(env_id: str) -> gym.envs.registration.EnvSpec:
    """Import the family of `env_id` and return the specification of the environment.

    Args:
        env_id: a Gymnasium id, with an optional ``"module:"`` in front.

    Raises:
        MissingExtraError: the family is not installed; names the extra.
        UnknownEnvError: no such environment; close ids are suggested.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        _import_users(module, env_id)
    for prefix, register in _NAMESPACES.items():
        if name.startswith(prefix):
            register(name)
    if name not in gym.registry:
        _register_installed()
    try:
        spec = gym.spec(name)
    except gym.error.Error as error:
        raise UnknownEnvError(_unknown(name, error)) from error
    prepare_simulator(spec)
    return spec


def _import_users(module: str, env_id: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists; something that it needs does not
        raise UnknownEnvError(
            f"{env_id!r} names the module {module!r}, which cannot be found; it must be importable "
            "from where the run starts"
        ) from error


def prepare_simulator(spec: gym.envs.registration.EnvSpec) -> None:
    """Check that the simulator behind `spec` is installed, and keep it quiet in this process.

    Raises:
        MissingExtraError: it is not installed; names the extra.
    """
    entry = str(spec.entry_point)
    if "gymnasium.envs.mujoco" in entry:
        _import("mujoco", spec.id, extra="mujoco")
        quiet_mujoco()
    elif "gymnasium.envs.box2d" in entry:
        _import("Box2D", spec.id, extra="box2d")


def _register_ale(env_id: str) -> None:
    gym.register_envs(_import("ale_py", env_id, extra="atari"))


def _register_pusht(env_id: str) -> None:
    _import("gym_pusht", env_id, extra="pusht")


def _register_minatar(env_id: str) -> None:
    module = _import("minatar.gym", env_id, extra="minatar")
    if not any(name.startswith("MinAtar/") for name in gym.registry):
        module.register_envs()


_NAMESPACES: dict[str, Callable[[str], None]] = {
    "ALE/": _register_ale,
    "gym_pusht/": _register_pusht,
    "MinAtar/": _register_minatar,
}


def _import(module: str, env_id: str, *, extra: str) -> Any:
    try:
        with warnings.catch_warnings():
            # Nobody here can act on them, and Box2D's crashes the process if it becomes an error.
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        reason = f"the module {error.name!r} is not installed"
        raise MissingExtraError(env_id, extra=extra, reason=reason) from error


def _register_installed() -> None:
    """Register the families that are installed, for ids without a namespace and suggestions."""
    for package, register in (("ale_py", _register_ale), ("minatar", _register_minatar)):
        if importlib.util.find_spec(package) is not None:
            register("")


def _unknown(name: str, error: gym.error.Error) -> str:
    folded = {known.lower(): known for known in gym.registry}
    close = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)
    message = f"no environment {name!r} is registered ({error})."
    if close:
        message += f" Did you mean {' or '.join(folded[known] for known in close)}?"
    return f"{message} An environment of your own is found as 'module_that_registers_it:{name}'."
