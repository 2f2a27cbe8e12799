"""Weights in parts: dealt evenly, visible only together, and never two versions apart."""

import os
import pickle
import subprocess
import sys
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


RANKS = """
import os, random, sys, time
import torch
import torch.distributed as dist
from rlightning.policy.over_ranks import check_same_weights, least_over_ranks
from rlightning.runtime import process_group
from rlightning.weights import ShardedWeightBuffer

WORLD, SYNCS = 8, 100
torch.set_num_threads(1)
address, buffer = process_group.free_address(), ShardedWeightBuffer(WORLD, timeout_s=90)

def rank_main(rank):
    generator = random.Random(rank)
    group = process_group.init(rank, WORLD, address, timeout_s=90)
    own = ShardedWeightBuffer.attach(buffer.names, timeout_s=90)
    learner = torch.nn.Linear(20, 20)
    for version in range(SYNCS):
        time.sleep(generator.random() * 0.004)
        assert least_over_ranks(rank + version, group) == version
        with torch.no_grad():
            learner.weight.fill_(version)
            learner.bias.fill_(version)
        own.publish_shard(version, rank, dict(learner.state_dict()))
        time.sleep(generator.random() * 0.004)
        assert own.wait_for(version, 90)
        with own.read() as (seen, weights):
            values = {float(t.min()) for t in weights.values()}
            values |= {float(t.max()) for t in weights.values()}
            assert seen in (version, version + 1) and values == {float(seen)}, (seen, values)
        check_same_weights(learner, group)
    process_group.destroy()

children = []
for rank in range(WORLD):
    child = os.fork()
    if child == 0:
        try:
            rank_main(rank)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
buffer.close()
assert codes == [0] * WORLD, codes
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_eight_learners_that_publish_and_agree_at_random_moments_all_go_on():
    done = subprocess.run(
        [sys.executable, "-c", RANKS],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
