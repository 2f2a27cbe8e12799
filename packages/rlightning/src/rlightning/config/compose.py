"""Compose a configuration from a folder of YAML files and command-line overrides, with Hydra.

Everything Hydra's command line accepts works: ``group=option``, ``a.b=c``, ``+new=val``,
``~key``. A plain ``a.b=c`` also sets documented keys that the files leave out; whether a key
exists is for the configuration models to say, which suggest the right one.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import threading
from typing import TYPE_CHECKING, Any

import yaml

from rlightning.config.schema import MainConfig
from rlightning.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CONFIGS", "NO_SWEEP", "compose", "compose_main"]

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
"""The configurations that ship with the package."""

NO_SWEEP = (
    "one command is one run, with one value per key (a list stands in brackets); for several "
    "values write a loop, as in: for seed in 0 1 2; do rlightning train CONFIG train.seed=$seed "
    "log.name=seed-$seed; done"
)

_ONE_AT_A_TIME = threading.Lock()


def compose(config_dir: str | pathlib.Path, config_name: str, overrides: Sequence[str] = ()) -> Any:
    """Return the composed OmegaConf configuration.

    Args:
        config_dir: the folder with ``<config_name>.yaml`` and its groups.
        config_name: the file's name without ``.yaml``.
        overrides: Hydra overrides.

    Raises:
        ConfigError: the folder, the file or an override is wrong.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    folder = pathlib.Path(config_dir).resolve()
    name = config_name.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        present = sorted(path.stem for path in folder.glob("*.yaml"))
        raise ConfigError(
            f"there is no {name}.yaml in {folder}.{did_you_mean(name, present)} "
            f"Found: {', '.join(present) or 'no YAML file'}."
        )
    prepared = [_accept_keys_that_files_leave_out(item, folder) for item in overrides]
    try:
        with _hydra_to_itself(), initialize_config_dir(version_base=None, config_dir=str(folder)):
            return hydra_compose(config_name=name, overrides=prepared)
    except OverrideParseException as error:
        raise ConfigError(
            f"{error.override.removeprefix('++')!r} cannot be read; expected key=value. A value "
            "with brackets, quotes or letters beyond ASCII stands in double quotes of its own, "
            """as in 'key="the value"'"""
        ) from error
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise ConfigError(_why_not(name, error)) from error


def _why_not(name: str, error: Exception) -> str:
    """Say in words of a run's configuration what Hydra said in its own."""
    sweep = "--multirun" in str(error) and re.search(r"'\+*(.*)'", str(error))
    if sweep:
        return f"{sweep[1]}: {NO_SWEEP}"
    listed = "DictConfig with ListConfig" in str(error.__cause__)
    override = listed and re.search(r"\+*(([\w.]+)=.*)", str(error))
    if override:
        whole, key = override.groups()
        return (
            f"{whole}: `{key}` of {name}.yaml is a mapping of keys, and a list on the command line "
            f"does not replace it. Set its keys, as in {key}.KEY=VALUE, or write the list in a file"
        )
    return f"cannot compose {name}.yaml: {error}"


@contextlib.contextmanager
def _hydra_to_itself() -> Iterator[None]:
    """Hydra has one state per process: take turns with other threads, and with a script's own."""
    from hydra.core.global_hydra import GlobalHydra

    with _ONE_AT_A_TIME:
        outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
        try:
            yield
        finally:
            GlobalHydra.instance().hydra = outer  # another instance by now


def compose_main(
    config_dir: str | pathlib.Path, config_name: str, overrides: Sequence[str] = ()
) -> MainConfig:
    """Return the composed and checked configuration of a run; see `compose`."""
    from omegaconf.errors import OmegaConfBaseException

    composed = compose(config_dir, config_name, overrides)
    try:
        return MainConfig.from_omegaconf(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot resolve {config_name}: {error}") from error


def _accept_keys_that_files_leave_out(override: str, folder: pathlib.Path) -> str:
    key = re.match(r"[A-Za-z_][\w.]*(?==)", override)
    if key is None or (folder / key[0]).is_dir():
        return override  # a prefixed override, or the choice of a group's option
    return f"++{override}"
