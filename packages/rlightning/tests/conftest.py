"""Fixtures that several test modules share."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlightning.config import PolicyConfig, TrainConfig
from rlightning.config.base import resolve_extras
from rlightning.policy.policy_group import PolicyGroup
from rlightning.types import EnvMeta
from rlightning.utils.registry import POLICIES


class OffPolicyTools:
    """Small policies that learn from a `ReplayBuffer`, built without a run around them."""

    VECTOR = spaces.Box(-np.inf, np.inf, (3,))

    @classmethod
    def make(
        cls, kind, *, space, n_envs=4, observation_space=None, model=None, optim=None, **train
    ):
        """One TRAIN and one EVAL instance with equal weights."""
        policy_class = POLICIES.get(kind)
        config = PolicyConfig.from_dict(
            {"type": kind, "model_cfg": {"hidden_sizes": [8]} | (model or {}), "optim_cfg": optim}
        )
        config.train_config = TrainConfig.from_dict(
            {"max_epochs": 10, "max_rollout_steps": 8, "batch_size": 4, "seed": 0} | train
        )
        resolve_extras(config.train_config, [policy_class.TrainExtras], path="train", owner=kind)
        torch.manual_seed(0)
        group = PolicyGroup([policy_class(config, "train")], [policy_class(config, "eval")], config)
        meta = EnvMeta("e-0", space, observation_space or cls.VECTOR, n_envs)
        group.init(config.train_config, meta)
        group.sync_weights()
        return group

    @staticmethod
    def constant(network, *answers):
        """Make linear output layers answer the same numbers whatever comes in."""
        layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
        outputs = [layer for layer in layers if layer.out_features == len(answers[0])]
        with torch.no_grad():
            for layer, answer in zip(outputs, answers, strict=True):
                layer.weight.zero_()
                layer.bias.copy_(torch.tensor(answer))

    @staticmethod
    def tensors_of(module):
        """Copies of all parameters and buffers."""
        return {name: t.clone() for name, t in nn.Module.state_dict(module).items()}


@pytest.fixture(scope="session")
def off_policy():
    """What tests of off-policy algorithms share."""
    return OffPolicyTools
