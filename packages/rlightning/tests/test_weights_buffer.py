"""Published weights: versions that grow, copies, and never half of a set."""

import threading
import time

import numpy as np
import pytest
import torch

from rlightning.config import PolicyConfig
from rlightning.weights import WeightBuffer


def weights(value, tensors=4, size=1000):
    return {"net": {f"p{i}": torch.full((size,), float(value)) for i in range(tensors)}}


def test_nothing_is_readable_before_the_first_version():
    buffer = WeightBuffer()
    assert buffer.version == -1
    with pytest.raises(RuntimeError, match="call publish first"):
        buffer.get()


def test_the_newest_version_is_read():
    buffer = WeightBuffer()
    buffer.publish(0, weights(1))
    buffer.publish(3, weights(2))
    version, payload = buffer.get()
    assert (version, buffer.version) == (3, 3)
    assert payload["net"]["p0"][0] == 2


@pytest.mark.parametrize("version", [2, 1])
def test_versions_only_grow(version):
    buffer = WeightBuffer()
    buffer.publish(2, weights(1))
    with pytest.raises(ValueError, match=f"version {version} was published after version 2"):
        buffer.publish(version, weights(2))
    assert buffer.get()[1]["net"]["p0"][0] == 1


def test_a_published_version_does_not_change_with_the_learner():
    buffer, live = WeightBuffer(), weights(1)
    buffer.publish(0, live)
    live["net"]["p0"].fill_(9)
    live["net"]["new"] = 1
    payload = buffer.get()[1]
    assert payload["net"]["p0"][0] == 1
    assert "new" not in payload["net"]


def test_gradients_and_plain_values_are_left_behind_or_kept():
    buffer = WeightBuffer()
    buffer.publish(0, {"a": torch.ones(1, requires_grad=True), "note": "text", "n": [1, 2]})
    payload = buffer.get()[1]
    assert not payload["a"].requires_grad
    assert (payload["note"], payload["n"]) == ("text", [1, 2])


def test_eight_readers_never_see_half_of_a_version():
    buffer = WeightBuffer()
    buffer.publish(0, weights(0))
    stop, torn, reads = threading.Event(), [], [0] * 8

    def read(index):
        last = 0
        while not stop.is_set():
            version, payload = buffer.get()
            seen = {float(t[0]) for t in payload["net"].values()}
            seen |= {float(t[-1]) for t in payload["net"].values()}
            if seen != {float(version)} or version < last:
                torn.append((version, seen))
            last = version
            reads[index] += 1

    threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 5
    live = weights(0)
    version = 0
    while time.monotonic() < deadline and (version < 50 or min(reads) < 20):
        version += 1
        for tensor in live["net"].values():
            tensor.fill_(version)
        buffer.publish(version, live)
    stop.set()
    for thread in threads:
        thread.join(5)
    assert torn == []
    assert version >= 50
    assert min(reads) >= 20


def test_waiting_ends_with_the_version_or_the_deadline():
    buffer = WeightBuffer()
    assert not buffer.wait_for(0, timeout_s=0.01)
    done = []
    thread = threading.Thread(target=lambda: done.append(buffer.wait_for(1, timeout_s=10)))
    thread.start()
    buffer.publish(0, weights(0))
    buffer.publish(1, weights(1))
    thread.join(10)
    assert done == [True]


@pytest.mark.parametrize(
    ("strategy", "type_", "kind"),
    [
        ("None", "WeightBuffer", None),
        ("Double", "WeightBuffer", "WeightBuffer"),
        ("Shared", "CPUWeightBuffer", "CPUWeightBuffer"),
        ("Sharded", "ShardedWeightBuffer", "ShardedWeightBuffer"),
    ],
)
def test_the_configured_strategy_decides_about_the_buffer(strategy, type_, kind):
    from rlightning.build import _build_weight_buffer

    keys = {"buffer_strategy": strategy, "type": type_}
    built = _build_weight_buffer(PolicyConfig.from_dict({"type": "P", "weight_buffer": keys}))
    assert kind == (None if built is None else type(built).__name__)
    if built is not None:
        built.publish(0, weights(5))
        assert built.get()[1]["net"]["p0"][0] == 5
        built.close()


def test_what_was_gotten_stays_and_memory_that_nobody_reads_is_used_again():
    buffer = WeightBuffer()
    buffer.publish(0, weights(0))
    kept = buffer.get()[1]["net"]["p0"]
    places = set()
    for version in range(1, 8):
        buffer.publish(version, weights(version))
        with buffer.read() as (seen, payload):
            assert (seen, float(payload["net"]["p0"][0])) == (version, version)
            places.add(payload["net"]["p0"].data_ptr())
    assert kept[0] == 0
    assert len(places) == 2
    assert kept.data_ptr() not in places


def test_what_is_lent_stays_for_the_length_of_the_block():
    buffer = WeightBuffer()
    buffer.publish(0, weights(0))
    with buffer.read() as (_, first), buffer.read() as (_, second):
        for version in range(1, 5):
            buffer.publish(version, weights(version))
        assert (first["net"]["p0"][0], second["net"]["p3"][-1]) == (0, 0)
    assert buffer.staleness(1) == 3
    buffer.close()
    with pytest.raises(RuntimeError, match="call publish first"), buffer.read():
        pass


def test_a_version_is_one_piece_of_memory_and_a_new_shape_gets_new_memory():
    buffer = WeightBuffer()
    buffer.publish(0, weights(0))
    tensors = list(buffer.get()[1]["net"].values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    buffer.publish(1, weights(1, tensors=2, size=3))
    assert [tuple(t.shape) for t in buffer.get()[1]["net"].values()] == [(3,), (3,)]


def test_arrays_are_copied_too():
    buffer, live = WeightBuffer(), np.ones(3)
    buffer.publish(0, {"a": live, "t": torch.ones(1)})
    live[:] = 7
    assert buffer.get()[1]["a"].tolist() == [1, 1, 1]
