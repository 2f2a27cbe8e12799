"""What a policy is made of: which modules, which other tensors, which stateful helpers.

Pure functions over a module's attributes; `BasePolicy` calls them and nothing else does.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rlightning.errors import CheckpointError, ContractError

__all__ = [
    "EXTRA_STATE",
    "Settings",
    "find_generators",
    "find_modules",
    "find_optimizers",
    "find_stateful",
    "load_extra_state",
    "optimizer_settings",
    "read_extra_state",
    "read_training_state",
    "unwrap",
    "write_training_state",
]

EXTRA_STATE = "_extra_state"
"""The reserved key of a checkpoint for what stands outside `model_list`."""

_OWN_STATE = "policy"
_SETTINGS = "settings"
_GENERATOR = "generator_state"

Settings: TypeAlias = dict[str, list[dict[str, Any]]]
"""What optimizers were made with, by name: one dictionary per group of parameters."""


class _ListsModels(Protocol):
    model_list: list[tuple[str, nn.Module]]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel wrapper."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def find_modules(policy: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the direct children with a parameter that requires a gradient, by attribute name."""
    return [
        (name, module)
        for name, module in policy.named_children()
        if any(parameter.requires_grad for parameter in module.parameters())
    ]


def _outside_model_list(policy: Any) -> dict[str, torch.Tensor]:
    inside = {
        id(tensor)
        for _, module in policy.model_list
        for tensor in nn.Module.state_dict(module, keep_vars=True).values()
    }
    state = nn.Module.state_dict(policy, keep_vars=True)
    return {
        name: tensor
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and id(tensor) not in inside
    }


def read_extra_state(policy: Any) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer that no module of `model_list` holds."""
    return {name: tensor.detach() for name, tensor in _outside_model_list(policy).items()}


def load_extra_state(policy: Any, extra: dict[str, torch.Tensor]) -> None:
    """Copy what `read_extra_state` returned into `policy`.

    Raises:
        ContractError: the names or shapes are not this policy's.
    """
    own = _outside_model_list(policy)
    if own.keys() != extra.keys():
        raise ContractError(
            f"the state outside model_list has the names {sorted(extra)}; this policy has "
            f"{sorted(own)}"
        )
    for name, tensor in own.items():
        if tensor.shape != extra[name].shape:
            raise ContractError(
                f"{name} has shape {tuple(extra[name].shape)}; this policy has "
                f"{tuple(tensor.shape)}"
            )
        # A buffer that `rollout_step` replaced is an inference tensor, writable only in that mode.
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.copy_(extra[name])


def _attributes(policy: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in vars(policy).items():
        if isinstance(value, dict) and not name.startswith("_"):
            found |= {f"{name}.{key}": item for key, item in value.items()}
        elif isinstance(value, (list, tuple)):
            found |= {f"{name}.{index}": item for index, item in enumerate(value)}
        else:
            found[name] = value
    return found


def find_optimizers(policy: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that are attributes, or stand in a list or dict that is one."""
    return {
        name: value
        for name, value in _attributes(policy).items()
        if isinstance(value, torch.optim.Optimizer)
    }


def find_stateful(policy: nn.Module) -> dict[str, Any]:
    """Return optimizers, learning-rate schedulers, gradient scalers and generators by name."""
    kinds = (
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        torch.amp.GradScaler,
        torch.Generator,
    )
    return {name: value for name, value in _attributes(policy).items() if isinstance(value, kinds)}


def find_generators(policy: nn.Module) -> dict[str, torch.Generator]:
    """Return the random generators that are attributes, or stand in a list or dict that is one."""
    return {
        name: value
        for name, value in _attributes(policy).items()
        if isinstance(value, torch.Generator)
    }


def optimizer_settings(policy: nn.Module) -> Settings:
    """Return the settings that optimizers have now, by name and group, where they are plain."""
    plain = (int, float, str, list, tuple, type(None))
    return {
        name: [
            {
                # A schedule that warms up has lowered the rate already.
                key: group.get("initial_lr", value) if key == "lr" else value
                for key, value in group.items()
                if key not in ("params", "initial_lr") and isinstance(value, plain)
            }
            for group in optimizer.param_groups
        ]
        for name, optimizer in find_optimizers(policy).items()
    }


def _apply_changed_settings(stateful: dict[str, Any], saved: Settings, now: Settings) -> None:
    """Let restored optimizers have what the configuration has changed since they were saved.

    A learning rate that a schedule has moved keeps its place in it: it is scaled.
    """
    for name, groups in now.items():
        optimizer, before = stateful[name], saved.get(name, [])
        for index, (then, new) in enumerate(zip(before, groups, strict=False)):
            changed = {key: value for key, value in new.items() if _differ(then.get(key), value)}
            group = optimizer.param_groups[index]
            if "lr" in changed:
                rate = changed.pop("lr")
                group["lr"] = group["lr"] * rate / then["lr"] if then.get("lr") else rate
                if "initial_lr" in group:
                    group["initial_lr"] = rate
                for item in stateful.values():
                    if getattr(item, "optimizer", None) is optimizer and hasattr(item, "base_lrs"):
                        item.base_lrs[index] = rate
            group |= changed


def _differ(then: Any, now: Any) -> bool:
    if isinstance(then, (list, tuple)) and isinstance(now, (list, tuple)):
        return list(then) != list(now)  # betas: what was saved may come back as a list
    return bool(then != now)


def write_training_state(
    stateful: dict[str, Any], own: dict[str, Any], settings: Settings
) -> dict[str, Any]:
    """Return the states of `stateful`, the policy's own state and `settings` as one dictionary."""
    states: dict[str, Any] = {}
    for name, item in stateful.items():
        if isinstance(item, torch.Generator):
            states[name] = {_GENERATOR: item.get_state()}
        else:
            states[name] = item.state_dict()
    return {"stateful": states, _OWN_STATE: own, _SETTINGS: settings}


def read_training_state(
    stateful: dict[str, Any], state: dict[str, Any], settings: Settings
) -> dict[str, Any]:
    """Load the states into `stateful` and return the policy's own part.

    Args:
        stateful: what `find_stateful` returned.
        state: what `write_training_state` returned, from a policy of the same class.
        settings: those that the optimizers were made with. What differs from the saved ones, the
            configuration has changed: it wins.

    Raises:
        CheckpointError: the names are not the same; nothing has been loaded then.
    """
    saved = state["stateful"]
    if saved.keys() != stateful.keys():
        raise CheckpointError(
            f"the checkpoint holds the training state of {sorted(saved)}; this policy has "
            f"{sorted(stateful)}"
        )
    for name, item in stateful.items():
        if isinstance(item, torch.Generator):
            item.set_state(saved[name][_GENERATOR].cpu())
        else:
            item.load_state_dict(saved[name])
    _apply_changed_settings(stateful, state.get(_SETTINGS, {}), settings)
    own: dict[str, Any] = state[_OWN_STATE]
    return own
