"""Copies of torch state for checkpoints, and what torch algorithms share."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plugrl_server.common.checkpoint import Checkpoint
from plugrl_server.errors import PolicyContractError
from rlightning.policy.state import find_modules

if TYPE_CHECKING:
    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm
    from plugrl_server.policy.base_policy import BasePolicy

__all__ = [
    "as_module",
    "copy_weights",
    "learner_checkpoint",
    "load_learner",
    "load_weights",
    "publish",
    "snapshot",
]


def as_module(policy: BasePolicy, *, needed_by: str) -> nn.Module:
    """Give a policy as the module it is.

    Raises:
        PolicyContractError: it is none.
    """
    if not isinstance(policy, nn.Module):
        raise PolicyContractError(
            f"{needed_by} trains torch policies; {type(policy).__name__} is no BaseTorchPolicy"
        )
    return policy


def snapshot(value: Any) -> Any:
    """Copy nested state so that nothing in it changes afterwards; tensors go to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(item) for item in value)
    return copy.copy(value)


def copy_weights(policy: Any) -> dict[str, Any] | None:
    """Copy a policy's weights in rlightning's form; None for a policy without weights.

    Returns:
        ``weights``: the state dicts of the modules that train, by name; ``extra``: every other
        parameter and buffer by its full name.
    """
    if not isinstance(policy, nn.Module):
        return None
    modules = {name: dict(module.state_dict()) for name, module in find_modules(policy)}
    inside = {f"{name}.{key}" for name, state in modules.items() for key in state}
    extra = {key: value for key, value in policy.state_dict().items() if key not in inside}
    weights: dict[str, Any] = snapshot({"weights": modules, "extra": extra})
    return weights


def load_weights(policy: Any, weights: dict[str, Any] | None) -> None:
    """Load what `copy_weights` gave, here or in rlightning.

    Raises:
        PolicyContractError: the names or shapes are not this policy's.
    """
    if weights is None or not isinstance(policy, nn.Module):
        return
    try:
        modules = weights["weights"].items()
        flat = {f"{name}.{key}": value for name, state in modules for key, value in state.items()}
        policy.load_state_dict({**flat, **weights["extra"]})
    except (RuntimeError, KeyError, AttributeError) as error:
        raise PolicyContractError(
            f"the checkpoint's weights do not fit {type(policy).__name__}; it was saved by another "
            f"policy or with other flags ({error})"
        ) from error


@torch.no_grad()
def publish(source: nn.Module, target: nn.Module) -> None:
    """Copy all weights and buffers into another instance of the same policy."""
    state = source.state_dict()
    for name, tensor in target.state_dict().items():
        tensor.copy_(state[name])


def learner_checkpoint(algorithm: BaseAlgorithm) -> Checkpoint:
    """Copy what learning changes: weights, optimizers and `BaseAlgorithm.learner_meta`."""
    optimizers = algorithm.named_optimizers()
    return Checkpoint(
        step=algorithm.global_step,
        model=copy_weights(algorithm.learner_policy),
        optimizer={name: snapshot(item.state_dict()) for name, item in optimizers.items()},
        meta=algorithm.learner_meta(),
    )


def load_learner(algorithm: BaseAlgorithm, checkpoint: Checkpoint) -> None:
    """Continue from what `learner_checkpoint` gave.

    Raises:
        PolicyContractError: the weights are another policy's.
    """
    load_weights(algorithm.policy, checkpoint.model)
    load_weights(algorithm.learner_policy, checkpoint.model)
    optimizers = algorithm.named_optimizers()
    for name, state in (checkpoint.optimizer or {}).items():
        optimizers[name].load_state_dict(state)
    algorithm.load_learner_meta(checkpoint.meta)
