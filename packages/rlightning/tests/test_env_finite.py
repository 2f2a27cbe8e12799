"""The check of what environments return: fast where all is well, exact where it is not."""

import numpy as np
import pytest

from rlightning.env.finite import check_finite
from rlightning.errors import NonFiniteError
from rlightning.types import EnvRet

NO = np.zeros(2, bool)


def check(observation, reward=None):
    reward = np.zeros(2, np.float32) if reward is None else reward
    check_finite(
        EnvRet("a-0", observation, reward, NO, NO), num_envs=2, step=7, label="env 'a' worker 0"
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("order", ["C", "F"])
def test_one_bad_number_is_found_in_its_row(dtype, bad, order):
    observation = np.ones((2, 3), dtype, order=order)
    observation[1, 2] = bad
    with pytest.raises(NonFiniteError, match=r"observation of env 'a' worker 0 \(row 1\).*step 7"):
        check(observation)
    with pytest.raises(NonFiniteError, match=r"reward of.* \(row 1\)"):
        check(np.ones((2, 3), dtype), reward=observation[:, 2])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_large_numbers_are_finite_though_their_squares_are_not(dtype):
    check(np.full((2, 3), np.finfo(dtype).max, dtype))


@pytest.mark.parametrize("array", [np.zeros((2, 0), np.float32), np.ones((2, 3), np.uint8)])
def test_no_number_and_whole_numbers_are_fine(array):
    check(array)
