"""Start learning from another run's weights: the parts that both policies have."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from rlightning.checkpoint import find_checkpoint, load_plain, load_weights
from rlightning.errors import CheckpointError
from rlightning.policy.state import EXTRA_STATE, load_extra_state, read_extra_state, unwrap
from rlightning.utils.logger import get_logger

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["start_from"]

_log = get_logger("policy")


def start_from(policy: Any, path: str) -> None:
    """Load the modules of a checkpoint that `policy` has too, by attribute name.

    Statistics outside them, such as a normaliser's, are taken where names and shapes agree.
    Optimizers and counters start anew.

    Args:
        policy: a TRAIN policy whose network exists.
        path: a policy's file, a checkpoint directory, or a run directory.

    Raises:
        CheckpointError: there is none, no module has a name of the policy's, or one of the same
            name is another network.
    """
    weights, extra = _read(pathlib.Path(path).expanduser())
    modules = dict(policy.model_list)
    shared = sorted(modules.keys() & weights.keys())
    if not shared:
        raise CheckpointError(
            f"policy.init_from: {path} holds the modules {sorted(weights)}; "
            f"{type(policy).__name__} has {sorted(modules)}, none of them"
        )
    for name in shared:
        module: nn.Module = unwrap(modules[name])
        try:
            module.load_state_dict(weights[name])
        except RuntimeError as error:
            raise CheckpointError(
                f"policy.init_from: the {name} of {path} is another network than this run's; give "
                f"both the same model_cfg and spaces: {error}"
            ) from error
    own = read_extra_state(policy)
    fits = {
        name: tensor
        for name, tensor in extra.items()
        if name in own and own[name].shape == tensor.shape and name != "n_updates"
    }
    load_extra_state(policy, own | fits)
    _log.info("started from %s: %s", path, ", ".join([*shared, *fits]))


def _read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if path.is_dir() or path.with_suffix("").is_dir():
        content = load_weights(find_checkpoint(path))
        return content["weights"], content.get("extra", {})
    if not path.exists():
        raise CheckpointError(f"policy.init_from: {path} does not exist")
    content = load_plain(path)
    extra = content.pop(EXTRA_STATE, {})
    return content, extra
