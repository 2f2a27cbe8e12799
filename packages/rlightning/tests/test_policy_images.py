"""Images beside proprioception: every algorithm acts on them and learns from them."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.buffer.replay_buffer import ReplayBuffer
from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.config import BufferConfig, PolicyConfig, TrainConfig
from rlightning.config.base import resolve_extras
from rlightning.policy.policy_group import PolicyGroup
from rlightning.types import BatchedData, EnvMeta, EnvRet
from rlightning.utils.registry import POLICIES

SPACE = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (36, 38, 3), np.uint8),
        "joints": spaces.Box(-1, 1, (3,)),
    }
)
BOX, DISCRETE = spaces.Box(-1, 1, (2,)), spaces.Discrete(3)
ON_POLICY = ["PPOPolicy", "RecurrentPPOPolicy", "A2CPolicy", "VTracePPOPolicy"]
CASES = [
    *[(name, space) for name in ON_POLICY for space in (BOX, DISCRETE)],
    ("SACPolicy", BOX),
    ("TD3Policy", BOX),
    ("DQNPolicy", DISCRETE),
]
N_ENVS = 3


def env_ret(rng):
    samples = [SPACE.sample() for _ in range(N_ENVS)]
    empty = gym.vector.utils.create_empty_array(SPACE, N_ENVS)
    observation = gym.vector.utils.concatenate(SPACE, samples, empty)
    ended = rng.random(N_ENVS) < 0.2
    info = {"final_obs": observation, "_final_obs": ended} if ended.any() else {}
    reward = rng.normal(size=N_ENVS).astype(np.float32)
    return EnvRet("e-0", dict(observation), reward, np.zeros(N_ENVS, bool), ended, info)


@pytest.mark.parametrize(("name", "action_space"), CASES, ids=str)
def test_a_policy_acts_on_images_and_vectors_and_learns_from_them(name, action_space):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    SPACE.seed(0)
    kind = POLICIES.get(name)
    train = TrainConfig.from_dict({"max_epochs": 3, "seed": 0, "batch_size": 12})
    model = {
        "image_encoder": "resnet",
        "image_size": [36, 36],
        "image_features": 8,
        "image_random_shift": 2,
    }
    config = PolicyConfig.from_dict({"type": name, "model_cfg": model})
    config.train_config = train
    resolve_extras(train, [kind.TrainExtras], path="train", owner=name)
    group = PolicyGroup([kind(config, "train")], [kind(config, "eval")], config)
    meta = EnvMeta("e-0", action_space, SPACE, N_ENVS)
    group.init(train, meta)
    group.sync_weights()
    on_policy = name in ON_POLICY
    buffer_kind = RolloutBuffer if on_policy else ReplayBuffer
    section = {"type": buffer_kind.__name__, "capacity": 64}
    buffer = buffer_kind(BufferConfig.from_dict(section), seed=0)
    buffer.init([meta])
    rng = np.random.default_rng(0)
    for step in range(9):
        batch = BatchedData(["e-0"], [env_ret(rng)])
        ends = on_policy and step == 8
        buffer.add_batched_transition(batch, group.rollout_batch(batch), [ends])
    before = {key: value.clone() for key, value in group.train_list[0].state_dict().items()}
    group.update_dataset(buffer.sample(batch_size=12, shuffle=not on_policy))
    metrics = group.train()
    after = group.train_list[0].state_dict()
    assert all(np.isfinite(float(value)) for value in metrics.values())
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert any("projection" in key for key in moved), "the image encoder has not learned"
