"""How weights lie in memory: every tensor where its layout says, everything back as it was."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from rlightning.errors import ContractError
from rlightning.weights.layout import Layout, copy_into, memory_for


def through_memory(weights, *, text=False):
    layout, tensors = Layout.of(weights)
    memory = memory_for(layout, "cpu")
    copy_into(layout.views(memory), tensors)
    if text:
        layout = Layout.from_json(layout.to_json())
    return layout.build(layout.views(memory))


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
)
def test_tensors_of_any_dtype_come_back_bit_for_bit(dtype, text):
    tensor = (torch.randn(3, 5) * 3).to(dtype)
    back = through_memory({"a": tensor, "b": tensor[1:, ::2]}, text=text)
    assert (back["a"].dtype, back["a"].shape) == (dtype, (3, 5))
    assert torch.equal(back["a"], tensor)
    assert torch.equal(back["b"], tensor[1:, ::2])
    assert back["a"].data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("text", [False, True])
def test_containers_arrays_and_plain_values_come_back_as_they_were(text):
    weights = {
        "weights": OrderedDict(layer=torch.ones(2, 2)),
        "extra": {"step": torch.tensor(7), "empty": torch.zeros(0, 3)},
        3: [np.arange(3, dtype=np.int16), (1.5, None, True, "text")],
    }
    back = through_memory(weights, text=text)
    assert list(back) == ["weights", "extra", 3]
    assert torch.equal(back["weights"]["layer"], torch.ones(2, 2))
    assert (back["extra"]["step"].item(), back["extra"]["step"].shape) == (7, ())
    assert back["extra"]["empty"].shape == (0, 3)
    assert back[3][1] == (1.5, None, True, "text")
    assert isinstance(back[3][0], np.ndarray)
    np.testing.assert_array_equal(back[3][0], np.arange(3, dtype=np.int16))


def test_parameters_and_what_is_not_contiguous_are_copied_as_values():
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    read_only = np.arange(4.0)
    read_only.flags.writeable = False
    back = through_memory({"p": parameter, "n": read_only})
    assert torch.equal(back["p"], parameter.detach())
    assert not back["p"].requires_grad
    np.testing.assert_array_equal(back["n"], read_only)


def test_all_tensors_lie_in_one_piece_each_at_a_multiple_of_64_bytes():
    layout, _ = Layout.of({"a": torch.zeros(3), "b": [torch.zeros(100, dtype=torch.int8)]})
    assert [(entry.name, entry.start, entry.size_bytes) for entry in layout.entries] == [
        ("a", 0, 12),
        ("b.0", 64, 100),
    ]
    assert layout.size_bytes == 64 + 128
    memory = memory_for(layout, "cpu")
    assert layout.views(memory)[1].data_ptr() == memory.data_ptr() + 64
    assert Layout.from_json(layout.to_json()).entries == layout.entries


def test_equal_sets_have_equal_layouts_whatever_their_values():
    one, _ = Layout.of({"a": torch.zeros(3), "n": 1})
    two, _ = Layout.of({"a": torch.ones(3), "n": 1})
    assert one == two
    assert Layout.of({"a": torch.ones(4), "n": 1})[0] != one


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": {"b": torch.eye(3).to_sparse()}}, "a.b is a sparse tensor"),
        ({"pair": namedtuple("Pair", "x y")(1, 2)}, "pair is a Pair; weights are nested"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_name(weights, message):
    with pytest.raises(ContractError, match=message):
        Layout.of(weights)


def test_what_only_this_process_understands_is_refused_as_text():
    layout, _ = Layout.of({"f": len})
    assert layout.build([])["f"] is len
    with pytest.raises(ContractError, match="hold a builtin_function_or_method; between processes"):
        layout.to_json()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_of_a_gpu_stay_there_or_come_back_whole():
    weights = {"a": torch.randn(1000, device="cuda"), "n": np.arange(3)}
    layout, tensors = Layout.of(weights)
    for device in ("cuda", "cpu"):
        memory = memory_for(layout, device)
        copy_into(layout.views(memory), tensors)
        back = layout.build(layout.views(memory))
        assert back["a"].device.type == device
        assert torch.equal(back["a"].cpu(), weights["a"].cpu())
        np.testing.assert_array_equal(back["n"], np.arange(3))
