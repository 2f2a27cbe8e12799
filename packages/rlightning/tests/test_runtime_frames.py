"""Frames: what goes in comes out, on aligned writable memory; what cannot go is refused."""

import copy
import pickle
import socket
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlightning.runtime.channel import (
    Channel,
    ChannelClosedError,
    Listener,
    Watch,
    connect,
    packed,
    unpacked,
)
from rlightning.runtime.frames import UnframeableError, aligned, decode, encode, with_arrays
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


def test_the_state_of_modules_stays_what_it_is():
    state = torch.nn.BatchNorm1d(3).state_dict()
    result = through({"norm": state})["norm"]
    assert type(result) is type(state)
    assert list(result) == list(state)
    assert result._metadata == state._metadata
    module = torch.nn.BatchNorm1d(3)
    module.load_state_dict(result)


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


def test_who_watches_several_ends_sees_where_something_is():
    (one, two), (three, four) = pair(), pair()
    watch = Watch(two, four)
    assert watch.wait(0.0) == [False, False]
    three.send(packed("a") + packed("b"))
    assert watch.wait() == [False, True]
    assert four.receive(1.0) == "a"
    assert watch.wait() == [False, True], "what was read ahead counts"
    one.close()
    assert watch.wait() == [True, True]
    assert four.receive(1.0) == "b"
    for end in (two, three, four):
        end.close()


def test_a_frame_can_be_passed_on_as_it_is_and_opened_on_the_way():
    """Whoever opens it on the way may change what it sees, and not what it passes on."""
    one, two = pair()
    large = EnvRet("e", np.arange(40_000.0))
    for value in exchanged()[1], large:
        thread = threading.Thread(target=one.send, args=(packed([value]),))
        thread.start()
        frame = two.receive_frame(5.0)
        thread.join()
        opened = unpacked(frame, as_arrays=True)[0]
        field = opened.observation if value is large else opened.action
        assert type(field) is np.ndarray
        field[:] = 0
        original = large.observation if value is large else value.action
        passed = unpacked(frame)[0]
        assert type(passed) is type(value)
        assert same(original, passed.observation if value is large else passed.action)
    one.close()
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


# ---- values that are only passed on --------------------------------------------------------------


def across(value, *, sealed=False):
    """Return `value` after a way through a channel."""
    one, two = socket.socketpair()
    sender, receiver = Channel(one), Channel(two, sealed=sealed)
    sender.send(packed(value))
    received = receiver.receive(5.0)
    sender.close()
    receiver.close()
    return received


def exchanged():
    env_ret = EnvRet("e-0", np.ones((2, 3)), np.zeros(2), info={"final_obs": np.zeros((2, 3))})
    response = PolicyResponse("e-0", action=torch.tensor([[1.5], [2.5]]), value=torch.zeros(2))
    return env_ret, response


def test_what_is_passed_on_unopened_arrives_as_it_was_sent():
    for value in exchanged():
        passed = across(across([value, 1], sealed=True))[0]
        assert type(passed) is type(value)
        assert passed.env_id == "e-0"
        assert list(passed.to_dict()) == list(value.to_dict())
    env_ret, response = across(across(exchanged(), sealed=True))
    assert np.array_equal(env_ret.info["final_obs"], np.zeros((2, 3)))
    assert env_ret.info["final_obs"].flags.writeable
    assert torch.equal(response.action, torch.tensor([[1.5], [2.5]]))


def test_the_first_look_makes_an_ordinary_value_of_a_sealed_one():
    env_ret, response = across(exchanged(), sealed=True)
    assert isinstance(env_ret, EnvRet)
    assert type(env_ret) is not EnvRet
    assert hash(env_ret) == hash("e-0")
    assert env_ret.has_info("final_obs")
    assert type(env_ret) is EnvRet
    assert type(env_ret.last_terminated) is bool
    assert response.value.tolist() == [0.0, 0.0]
    assert type(response) is PolicyResponse


def test_what_is_written_into_a_sealed_value_goes_on_with_it():
    env_ret, response = across(exchanged(), sealed=True)
    env_ret.last_reward = np.ones(2)
    response.extra = 3.0
    env_ret, response = across((env_ret, response))
    assert env_ret.last_reward.tolist() == [1.0, 1.0]
    assert env_ret.observation.shape == (2, 3)
    assert response.extra == 3.0
    assert response.value.tolist() == [0.0, 0.0]
    (other,) = across(exchanged()[1:], sealed=True)
    other.extras = {"action": 1}
    assert across(other).to_dict() == {"action": 1}


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_sealed_value_is_an_ordinary_one(way):
    env_ret, response = (way(value) for value in across(exchanged(), sealed=True))
    assert type(env_ret) is EnvRet
    assert env_ret.observation.tolist() == np.ones((2, 3)).tolist()
    assert type(response) is PolicyResponse
    assert response.action.tolist() == [[1.5], [2.5]]


def test_a_response_for_an_environment_without_torch_holds_arrays():
    fields = {"action": torch.tensor([1.5]), "low": torch.tensor([0.1]).bfloat16(), "n": 1}
    response = PolicyResponse("e-0", **fields)
    sealed = across(response, sealed=True)
    for value in (response, sealed):
        arrived = across(with_arrays(value))
        assert type(arrived.action) is np.ndarray
        assert arrived.low.dtype == np.float32
        assert torch.equal(torch.from_numpy(arrived.low), fields["low"].float())
        assert arrived.n == 1
    assert torch.is_tensor(sealed.action), "for others it stays what it is"


VARIANTS = {
    "as before": {},
    "longer": {"x": np.arange(4.0)},
    "of another dtype": {"x": np.arange(3)},
    "strided": {"x": np.arange(6.0)[::2]},
    "a tensor": {"x": torch.arange(3.0)},
    "a tensor with a gradient": {"x": torch.arange(3.0, requires_grad=True)},
    "a scalar": {"x": np.float64(2.0)},
    "a number": {"x": 0.0},
    "a negative zero": {"x": -0.0},
    "an integer": {"x": 1},
    "a boolean": {"x": True},
    "nothing": {"x": None},
    "more": {"y": np.ones(2, bool)},
    "in another order": {"z": {"b": np.ones(2), "a": np.zeros(2)}},
    "nested": {"z": {"a": np.zeros(2), "b": np.ones(2)}},
    "a tuple": {"x": (1, np.ones(3))},
    "a list": {"x": [1, np.ones(3)]},
    "large": {"x": np.arange(2000.0)},
}


def same(one, two):
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and same(one.detach().numpy(), two.numpy())
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    return type(one) is type(two) and repr(one) == repr(two)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_value_that_looks_unlike_the_one_before_arrives_as_it_is(name):
    """Frames of one sender mostly look alike, which saves work: but only where they do."""
    before = {"x": np.arange(3.0), "z": {"a": np.zeros(2), "b": np.ones(2)}}
    changed = {**before, **VARIANTS[name]}
    for info in (before, before, before, changed, before, changed, changed, changed, before):
        env_ret = across(EnvRet("e-7", info["x"], info=info))
        assert same(info["x"], env_ret.observation)
        assert same(info, env_ret.info)
        response = across(PolicyResponse("e-7", **info))
        assert same(info, response.extras)


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True), (1, 1.0), ("1", 1)])
def test_a_number_that_equals_the_one_before_arrives_as_it_is(one, other):
    for value in (one, one, one, other):
        assert same(value, across(PolicyResponse("e-8", x=value)).x)


def test_two_threads_open_a_value_once():
    env_ret = across(exchanged(), sealed=True)[0]
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(env_ret.info)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(info is seen[0] for info in seen)


def test_a_frame_that_comes_in_pieces_is_put_together():
    one, two = socket.socketpair()
    receiver = Channel(two)
    content = b"".join(bytes(piece) for piece in packed(["a", np.arange(9)]) + packed("b"))
    for start in range(0, len(content), 7):
        one.sendall(content[start : start + 7])
    assert receiver.receive(1.0)[1].tolist() == list(range(9))
    assert receiver.poll(0.0)
    assert receiver.receive(1.0) == "b"
    one.close()
    receiver.close()
