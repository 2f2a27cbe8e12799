"""Published weights: versions that grow, copies, and never half of a set."""

import threading
import time

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


def test_the_configured_strategy_decides_about_the_buffer():
    from rlightning.build import _build_weight_buffer
    from rlightning.errors import ConfigError

    def built(**keys):
        return _build_weight_buffer(PolicyConfig.from_dict({"type": "P", "weight_buffer": keys}))

    assert built(buffer_strategy="None") is None
    assert isinstance(built(), WeightBuffer)
    with pytest.raises(ConfigError, match="CPUWeightBuffer shares weights between workers"):
        built(buffer_strategy="Shared", type="CPUWeightBuffer")
