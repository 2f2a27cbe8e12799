"""`BaseTorchPolicy`: a policy that is a ``torch.nn.Module``."""

from __future__ import annotations

from abc import ABC
from typing import Any

import numpy as np
import torch
from torch import nn

from plugrl_server.common.trees import map_tree
from plugrl_server.errors import UsageError
from plugrl_server.policy.base_policy import BasePolicy, PolicyRuntimeState
from plugrl_server.policy.torch_config import BaseTorchPolicyConfig
from rlightning.utils.tensors import default_device

__all__ = [
    "BaseTorchPolicy",
    "BaseTorchPolicyConfig",
    "PolicyRuntimeState",
    "numpy_state_to_torch_tree",
]


def numpy_state_to_torch_tree(state: Any) -> Any:
    """Turn arrays into CPU tensors that share their memory; read-only arrays are copied."""

    def convert(leaf: Any) -> torch.Tensor:
        array = np.asarray(leaf)
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    return map_tree(convert, state)


def _resolve(name: Any) -> torch.device:
    if name == "auto":
        return torch.device(default_device())
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            f"--policy.device is {name!r}; expected auto, cpu, cuda, or one GPU such as cuda:1"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--policy.device is {name}, and torch sees {torch.cuda.device_count()} GPUs here; "
            "auto takes what there is"
        )
    return device


class BaseTorchPolicy(BasePolicy, nn.Module, ABC):
    """A policy with a ``state_dict()``, which checkpoints need.

    Args:
        config: ``device`` says where the model is to run.

    Raises:
        UsageError: there is no such device.

    Attributes:
        device: the resolved device. Move modules and tensors there; nothing is moved for you.
    """

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        BasePolicy.__init__(self, config)
        self.device = _resolve(getattr(config, "device", "auto"))

    def extract_model_obs_tensor(self, _obs: dict[str, Any]) -> Any:
        """Give ``prepare_observation`` as tensors, on the CPU."""
        return numpy_state_to_torch_tree(self.prepare_observation(_obs))
