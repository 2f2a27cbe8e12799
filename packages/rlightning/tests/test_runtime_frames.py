"""Frames: what goes in comes out, on aligned writable memory; what cannot go is refused."""

import socket
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlightning.runtime.channel import Channel, ChannelClosedError, Listener, connect, packed
from rlightning.runtime.frames import UnframeableError, aligned, decode, encode
from rlightning.types import EnvRet, MultiAgentEnvRet, PolicyResponse


def through(value):
    outline, buffers, size = encode(value)
    memory = aligned(size)
    start = 0
    for buffer in buffers:
        memory[start : start + len(buffer)] = np.frombuffer(buffer, np.uint8)
        start += len(buffer) + -len(buffer) % 64
    assert start == size
    return decode(outline, memory)


@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5, float("inf"), "text", [1, "a"], (1, (2,)), {"a": {1: [None]}}]
)
def test_plain_values_keep_their_types(value):
    result = through(value)
    assert result == value
    assert type(result) is type(value)


@given(
    st.sampled_from(["f4", "f8", "i8", "u1", "u2", "?", "c8"]),
    st.lists(st.integers(0, 4), max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_arrays_keep_shape_dtype_and_values(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    result = through([array, 1])[0]
    assert result.dtype == array.dtype
    assert result.shape == array.shape
    assert np.array_equal(result, array)


def test_arrays_arrive_writable_and_aligned_to_64_bytes():
    for array in through([np.ones(3, np.float32), np.ones(5), np.zeros(7, np.uint8)]):
        assert array.flags.writeable
        assert array.ctypes.data % 64 == 0


def test_a_transposed_array_and_a_scalar_arrive_as_they_are():
    array = np.arange(6).reshape(2, 3).T
    result, scalar = through((array, np.float32(1.5)))
    assert np.array_equal(result, array)
    assert isinstance(scalar, np.float32)
    assert scalar == 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_stay_tensors(dtype):
    tensor = torch.tensor([[0, 1], [2, 3]]).to(dtype)
    result = through({"w": tensor})["w"]
    assert isinstance(result, torch.Tensor)
    assert result.dtype == dtype
    assert torch.equal(result, tensor)


def test_a_tensor_that_needs_a_gradient_arrives_without_one():
    result = through(torch.ones(2, requires_grad=True))
    assert not result.requires_grad


def test_batches_stay_batches():
    batch = TensorDict({"observation": {"a": torch.ones(4, 2)}, "reward": torch.zeros(4)}, [4])
    result = through([batch])[0]
    assert isinstance(result, TensorDict)
    assert result.batch_size == batch.batch_size
    assert torch.equal(result["observation", "a"], batch["observation", "a"])


def test_what_environments_and_policies_exchange_arrives_with_every_field():
    env_ret = EnvRet("e-0", np.ones(3), np.float64(1), info={"final_obs": np.zeros(3)})
    env_ret._extra["mask"] = np.ones(2, bool)
    response = PolicyResponse("e-0", action=torch.tensor([1]), log_prob=torch.tensor([0.5]))
    one, two = through((env_ret, response))
    assert one.to_dict().keys() == env_ret.to_dict().keys()
    assert one.ts_env_sent_ns == env_ret.ts_env_sent_ns
    assert np.array_equal(one.info["final_obs"], np.zeros(3))
    assert list(two.extras) == ["action", "log_prob"]
    assert two.ts_policy_sent_ns == response.ts_policy_sent_ns


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {"f": len},
        np.array([object()]),
        np.array(["text"]),
        np.array([1], dtype=">i4"),
        {(1, 2): 3},
        MultiAgentEnvRet("e", None),
        torch.eye(2).to_sparse(),
    ],
)
def test_what_a_frame_cannot_carry_is_refused(value):
    with pytest.raises(UnframeableError):
        encode([value])


def pair():
    one, two = socket.socketpair()
    return Channel(one), Channel(two)


def test_values_arrive_in_order_whatever_their_size():
    one, two = pair()
    values = [np.zeros(10), np.arange(3_000_000), "end"]

    def send():
        for value in values:
            one.send(packed(value))

    sender = threading.Thread(target=send)
    sender.start()
    received = [two.receive(10.0) for _ in values]
    sender.join()
    assert np.array_equal(received[1], values[1])
    assert received[2] == "end"
    one.close()
    two.close()


def test_a_silent_other_end_is_a_timeout_and_a_gone_one_is_an_error():
    one, two = pair()
    assert not two.poll(0.01)
    with pytest.raises(TimeoutError):
        two.receive(0.01)
    one.close()
    assert two.poll(1.0)
    with pytest.raises(ChannelClosedError):
        two.receive(1.0)
    two.close()


def test_a_listener_takes_one_connection_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    listener = Listener()
    one = connect(listener.path, 5.0)
    two = listener.accept(5.0)
    one.send(packed([1, 2]))
    assert two.receive(5.0) == [1, 2]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ChannelClosedError, match="cannot connect"):
        connect(listener.path, 1.0)
    one.close()
    two.close()
