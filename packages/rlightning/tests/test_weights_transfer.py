"""Weights as text and one array: back as they were, without a copy, also from memory on loan."""

import gc

import numpy as np
import pytest
import torch

from rlightning.errors import ContractError
from rlightning.weights import PackedWeights, pack, unpack


def weights(value):
    return {"weights": {"net": {"w": torch.full((4, 3), value), "b": torch.ones(3)}}, "extra": {}}


def test_packed_weights_are_a_copy_in_one_array_and_come_back_as_views_of_it():
    live = weights(2.0)
    packed = pack(live)
    live["weights"]["net"]["w"].fill_(9)
    assert (packed.data.ndim, packed.data.dtype) == (1, np.uint8)
    back = unpack(packed)
    assert torch.equal(back["weights"]["net"]["w"], torch.full((4, 3), 2.0))
    assert back["weights"]["net"]["w"].data_ptr() == packed.data.ctypes.data
    assert back["extra"] == {}


def test_memory_that_is_not_to_be_written_to_is_read_without_a_copy_and_outlives_its_name():
    packed = pack(weights(3.0))
    lent = packed.data.copy()
    lent.flags.writeable = False
    back = unpack(PackedWeights(packed.layout, lent))
    assert back["weights"]["net"]["w"].data_ptr() == lent.ctypes.data
    del lent, packed
    gc.collect()
    [np.full(4096, 77, dtype=np.uint8) for _ in range(50)]
    assert torch.equal(back["weights"]["net"]["w"], torch.full((4, 3), 3.0))


def test_memory_is_used_again_where_it_fits():
    first = pack(weights(1.0))
    second = pack(weights(2.0), into=first)
    assert second.data.ctypes.data == first.data.ctypes.data
    assert unpack(second)["weights"]["net"]["w"][0, 0] == 2
    third = pack({"other": torch.ones(500)}, into=second)
    assert third.data.ctypes.data != second.data.ctypes.data


def test_a_set_without_tensors_travels_too():
    assert unpack(pack({"extra": {}, "n": 1})) == {"extra": {}, "n": 1}


def test_what_cannot_travel_is_refused():
    with pytest.raises(ContractError, match="the weights hold a object"):
        pack({"a": object()})
