"""What a run that is resumed has in common with the one that wrote the checkpoint.

Pure functions over the two configurations and the saved state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from rlightning.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_saved_rows", "differences", "same_environments", "without_rows"]

_BESIDE_THE_ENVIRONMENT = frozenset(
    {
        "name",
        "num_cpus",
        "num_gpus",
        "evaluate_cfg",
        "step_timeout_s",
        "start_timeout_s",
        "start_method",
    }
)
"""Keys of an ``env`` entry that may change while an episode goes on."""
_OF_ANY_RUN = ("log", "debug", "verbose")
_ALWAYS_FREE = ("epoch", "eval", "save", "keep_", "record", "warm_up", "seed", "torch_threads")


def same_environments(saved_yaml: str, yaml_now: str) -> bool:
    """Whether two configurations make the same training environments."""
    return _environments(saved_yaml) == _environments(yaml_now)


def _environments(config_yaml: str) -> list[dict[str, Any]]:
    config = yaml.safe_load(config_yaml) or {}
    return [
        {key: value for key, value in entry.items() if key not in _BESIDE_THE_ENVIRONMENT}
        for entry in config.get("env", [])
    ]


def differences(saved_yaml: str, yaml_now: str) -> str:
    """Return a line for each setting that decides what a run's state looks like and has changed.

    Empty where none has, or where the checkpoint holds no configuration.
    """
    saved, now = (yaml.safe_load(text) or {} for text in (saved_yaml, yaml_now))
    changed = _compare(saved, now) if saved else ()
    return "".join(f"\n  {key}: {a} there, {b} here" for key, a, b in changed if _may_matter(key))


def _compare(saved: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield where two configurations differ, by path, with both values."""
    if all(isinstance(value, list) and dict in map(type, value) for value in (saved, now)):
        saved, now = dict(enumerate(saved)), dict(enumerate(now))
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in [*saved, *(key for key in now if key not in saved)]:
            yield from _compare(saved.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif saved != now:
        there, here = ("a section" if isinstance(item, dict) else item for item in (saved, now))
        yield path, there, here


def _may_matter(key: str) -> bool:
    section, _, name = key.partition(".")
    if section == "train":
        return not any(part in name for part in _ALWAYS_FREE)
    return section not in _OF_ANY_RUN and not name.endswith("num_gpus")


def without_rows(buffer_state: dict[str, Any]) -> dict[str, Any]:
    """Return a buffer's saved state without its transitions."""
    if "shards" in buffer_state:
        return {"shards": [without_rows(shard) for shard in buffer_state["shards"]]}
    return {key: value for key, value in buffer_state.items() if key != "contents"}


def check_saved_rows(buffer_state: dict[str, Any], *, marked: bool) -> None:
    """Refuse saved transitions that cannot stand beside those that this run will collect.

    Args:
        buffer_state: what the buffer's `state_dict` returned.
        marked: whether this run's rows tell the version of the weights that acted.

    Raises:
        CheckpointError: theirs do and this run's do not, or the other way round.
    """
    for shard in buffer_state.get("shards", [buffer_state]):
        paths = [list(path) for path in shard.get("contents", {}).get("paths", ())]
        if paths and (["weights_version"] in paths) != marked:
            have, lack = ("this run's", "the saved ones") if marked else ("the saved", "this run's")
            raise CheckpointError(
                "the saved transitions are of an engine of another kind: overlapping engines "
                "(asyncrl, async_rsl) note with which weights each was collected, others do not; "
                f"{have} have that note, {lack} have not"
            )
