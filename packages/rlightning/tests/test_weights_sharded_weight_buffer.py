"""Weights in parts: dealt evenly, visible only together, and never two versions apart."""

import pickle
import threading

import pytest
import torch

from rlightning.weights import ShardedWeightBuffer
from rlightning.weights.sharded_weight_buffer import deal


def weights(value):
    return {"big": torch.full((100,), value), "s": [torch.full((10,), value) for _ in range(4)]}


def value_of(payload):
    values = {float(t[0]) for t in (payload["big"], *payload["s"])}
    return values.pop() if len(values) == 1 else None


@pytest.fixture
def buffer():
    made = ShardedWeightBuffer(2, timeout_s=20)
    yield made
    made.close()


def test_items_are_dealt_so_that_shares_are_of_similar_size():
    assert deal([100, 10, 10, 10], 2) == [[0], [1, 2, 3]]
    assert deal([5, 4, 3, 3], 2) == [[0, 3], [1, 2]]
    assert deal([1], 3) == [[0], [], []]


def test_a_version_is_visible_when_all_its_parts_are(buffer):
    buffer.publish(0, weights(0.0))
    buffer.publish_shard(1, 0, weights(1.0))
    with buffer.read() as (version, payload):
        assert (version, value_of(payload)) == (0, 0)
    buffer.publish_shard(1, 1, weights(1.0))
    with buffer.read() as (version, payload):
        assert (version, value_of(payload)) == (1, 1)


def test_nothing_is_visible_while_a_first_part_is_missing(buffer):
    buffer.publish_shard(0, 1, weights(0.0))
    with pytest.raises(RuntimeError, match="call publish first"):
        buffer.get()


def test_a_part_waits_for_the_others_and_says_who_is_missing():
    buffer = ShardedWeightBuffer(2, timeout_s=0.05)
    buffer.publish_shard(0, 0, weights(0.0))
    with pytest.raises(TimeoutError, match=r"part 1 of the weights is at version -1, and part 0"):
        buffer.publish_shard(1, 0, weights(1.0))
    buffer.close()


def test_a_part_that_waited_goes_on_when_the_others_have_followed(buffer):
    buffer.publish_shard(0, 0, weights(0.0))
    ahead = threading.Thread(target=buffer.publish_shard, args=(1, 0, weights(1.0)))
    ahead.start()
    buffer.publish_shard(0, 1, weights(0.0))
    ahead.join(30)
    buffer.publish_shard(1, 1, weights(1.0))
    assert (buffer.get()[0], value_of(buffer.get()[1])) == (1, 1)


def test_more_parts_than_tensors_are_fine():
    buffer = ShardedWeightBuffer(9)
    buffer.publish(0, weights(3.0))
    reader = pickle.loads(pickle.dumps(buffer))
    assert (reader.names, value_of(reader.get()[1])) == (buffer.names, 3)
    buffer.close()


def test_at_least_one_part_is_asked_for():
    with pytest.raises(ValueError, match="found 0 shards; expected at least 1"):
        ShardedWeightBuffer(0)
