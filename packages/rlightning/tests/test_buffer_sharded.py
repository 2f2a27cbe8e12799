"""Several storages as one: nothing lost, nothing twice, equal shares."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.buffer.replay_buffer import ReplayBuffer
from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.buffer.sharded_buffer import ShardedBuffer
from rlightning.config import BufferConfig
from rlightning.errors import ConfigError, UnknownNameError
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse

SPACE = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
METAS = [EnvMeta(f"e-{index}", gym.spaces.Discrete(2), SPACE, 1) for index in range(3)]
IDS = [meta.env_id for meta in METAS]


def buffer_of(kind, capacity=100, **keys):
    return kind(BufferConfig(type=kind.__name__, capacity=capacity, **keys), seed=0)


def sharded(kind=RolloutBuffer, shards=2, *, trainers=1, **keys):
    buffer = ShardedBuffer([buffer_of(kind, **keys) for _ in range(shards)], capacity=200)
    buffer.init(METAS, IDS, train_worker_num=trainers)
    return buffer


def fill(buffer, steps):
    """Add `steps` transitions per worker: worker w sees 100 w, 100 w + 1, ..."""
    for step in range(steps + 1):
        rows = [
            EnvRet(env_id, np.array([100 * worker + step], np.float32), float(step))
            for worker, env_id in enumerate(IDS)
        ]
        answers = [PolicyResponse(env_id, action=np.int64(1)) for env_id in IDS]
        buffer.add_batched_transition(
            BatchedData(IDS, rows), BatchedData(IDS, answers), [step == steps] * 3
        )
    return buffer


def seen(batches):
    return sorted(float(value) for batch in batches for value in batch["observation"].flatten())


def test_every_transition_is_sampled_once_and_follows_from_itself():
    buffer = fill(sharded(), 4)
    assert [shard.size() for shard in buffer.shards] == [8, 4]
    assert buffer.size() == len(buffer) == 12
    [batch] = buffer.sample(shuffle=False)
    assert seen([batch]) == [0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203]
    assert torch.equal(batch["next_observation"], batch["observation"] + 1)
    assert buffer.size() == 0


def test_learners_share_what_there_is():
    buffer = fill(sharded(trainers=2), 4)
    batches = buffer.sample()
    assert [len(batch) for batch in batches] == [6, 6]
    assert len(set(seen(batches))) == 12


def test_a_batch_takes_an_equal_share_of_every_shard():
    buffer = fill(sharded(ReplayBuffer), 8)
    assert buffer.can_sample(9)
    [batch] = buffer.sample(batch_size=9)
    assert len(batch) == 9
    from_second = sum(100 <= value < 200 for value in seen([batch]))
    assert from_second == 4
    assert buffer.pending_size() == 0
    assert not buffer.can_sample(40)


def test_all_rows_and_single_ones_are_read():
    buffer = fill(sharded(ReplayBuffer), 2)
    assert len(buffer.get_all()) == 6
    assert float(buffer[0]["observation"]) == 0
    buffer.clear()
    assert buffer.size() == 0


def test_the_state_of_every_shard_is_restored():
    one, two = fill(sharded(ReplayBuffer), 8), fill(sharded(ReplayBuffer), 8)
    one.sample(batch_size=4)
    two.load_state_dict(one.state_dict())
    assert seen(one.sample(batch_size=4)) == seen(two.sample(batch_size=4))
    with pytest.raises(ConfigError, match="buffer_worker_num: 2"):
        sharded(ReplayBuffer, shards=3).load_state_dict(one.state_dict())


def test_more_shards_than_environments_and_unknown_environments_are_refused():
    with pytest.raises(ConfigError, match="4 storage workers for 3"):
        sharded(shards=4)
    with pytest.raises(UnknownNameError):
        sharded().truncate_one_episode("e-9")


def test_episodes_from_elsewhere_go_where_there_is_most_room():
    buffer = fill(sharded(), 4)
    episode = {
        "observation": np.zeros((3, 1), np.float32),
        "next_observation": np.ones((3, 1), np.float32),
        "action": np.ones(3, int),
        "reward": np.ones(3, np.float32),
        "terminated": np.zeros(3, bool),
        "truncated": np.zeros(3, bool),
    }
    buffer.add_episode(episode)
    assert [shard.size() for shard in buffer.shards] == [8, 7]


@pytest.mark.parametrize("kind", [RolloutBuffer, ReplayBuffer])
def test_one_buffer_reads_the_state_of_one_shard_and_refuses_that_of_several(kind):
    saved = fill(sharded(kind, shards=1), 3).state_dict(include_data=True)
    alone = buffer_of(kind)
    alone.init(METAS, IDS)
    alone.load_state_dict(saved)
    assert alone.size() == 9
    several = fill(sharded(kind), 3).state_dict(include_data=True)
    with pytest.raises(ConfigError, match="of 2 storage workers and this run has one"):
        alone.load_state_dict(several)


def test_who_has_a_batch_to_learn_from_is_asked_of_every_shard():
    assert fill(sharded(RolloutBuffer), 1).has_batch(64), "it is handed out once"
    replay = fill(sharded(ReplayBuffer), 4)  # 8 and 4
    assert replay.has_batch(8)
    assert not replay.has_batch(10)
