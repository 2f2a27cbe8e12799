"""Seeds are different by construction, and generator states survive JSON and torch.load."""

import io
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlightning.utils.seeding import derive_seed, get_rng_state, seed_everything, set_rng_state

bases = st.integers(0, 2**63)
names = st.sampled_from(["env", "worker", "rank", "policy"])


@given(base=bases, name=names, first=st.integers(0, 65534), second=st.integers(0, 65534))
def test_siblings_never_share_a_seed_not_even_through_their_rows(base, name, first, second):
    if first != second:
        gap = abs(derive_seed(base, name, first) - derive_seed(base, name, second))
        assert gap >= 2**14


@given(base=bases, other=bases, name=names, index=st.integers(0, 65534), row=st.integers(0, 2**14))
def test_evaluation_seeds_are_disjoint_from_training_seeds_with_every_row(
    base, other, name, index, row
):
    assert derive_seed(base, name, index) + row < 2**30 <= derive_seed(other, "eval", name, index)


@given(base=bases, path=st.lists(st.one_of(names, st.integers(0, 1000)), max_size=4))
def test_seeds_fit_in_31_bits_and_depend_on_the_arguments_only(base, path):
    seed = derive_seed(base, *path)
    assert 0 <= seed < 2**31
    assert type(seed) is int
    assert seed == derive_seed(base, *path)


def test_the_derivation_is_pinned_so_that_old_runs_stay_reproducible():
    assert [
        derive_seed(0, "env", 0),
        derive_seed(0, "env", 1),
        derive_seed(1, "eval", "env", 0),
    ] == [285240516, 285256900, 1645846571]


def test_a_thousand_workers_times_three_kinds_get_different_seeds():
    seeds = [derive_seed(7, kind, i) for kind in ("env", "worker", "rank") for i in range(1000)]
    assert len(set(seeds)) == 3000


@pytest.mark.parametrize(("base", "path"), [(-1, ()), (0, ("env", -1)), (0, ("env", 65535))])
def test_a_seed_out_of_range_is_refused(base, path):
    with pytest.raises(ValueError, match="must be"):
        derive_seed(base, *path)


def draw():
    return random.random(), float(np.random.normal()), float(torch.rand(()))


def test_seed_everything_repeats_the_draws_of_all_three_libraries():
    seed_everything(5)
    first = draw()
    seed_everything(5)
    assert draw() == first
    seed_everything(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_seed_everything_refuses_what_numpy_cannot_take():
    with pytest.raises(ValueError, match="2\\*\\*32"):
        seed_everything(2**32)


@pytest.mark.parametrize("carrier", ["json", "torch"])
def test_a_restored_state_continues_the_same_draws(carrier):
    seed_everything(3)
    draw()
    state = get_rng_state()
    expected = [draw() for _ in range(3)]
    if carrier == "json":
        state = json.loads(json.dumps(state))
    else:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    set_rng_state(state)
    assert [draw() for _ in range(3)] == expected
