import numpy as np
import pytest

from plugrl_envs.infos import add_info, add_infos


def joined(*infos):
    batch = {}
    for row, info in enumerate(infos):
        add_info(batch, info, row, len(infos))
    return batch


def test_numbers_become_arrays_with_a_row_mask():
    batch = joined({"x": 1.5, "n": 2, "ok": True}, {}, {"x": np.float32(2.5), "n": 4, "ok": False})
    assert batch["x"].tolist() == [1.5, 0, 2.5]
    assert batch["n"].dtype == np.int64
    assert batch["ok"].dtype == np.bool_
    for key in ("_x", "_n", "_ok"):
        assert batch[key].tolist() == [True, False, True]


def test_dictionaries_nest_and_arrays_stack():
    batch = joined({"pose": {"xy": np.array([1, 2])}}, {"pose": {"xy": np.array([3, 4])}})
    assert batch["pose"]["xy"].tolist() == [[1, 2], [3, 4]]
    assert batch["_pose"].tolist() == [True, True]


def test_texts_and_none_become_objects():
    assert joined({"task": "push"}, {"task": None})["task"].tolist() == ["push", None]


def test_a_column_that_no_longer_fits_loses_nothing():
    """A count that becomes a fraction, and arrays whose shapes differ between rows."""
    assert joined({"x": 1}, {"x": 0.5})["x"].tolist() == [1, 0.5]
    ragged = joined({"v": np.array([1, 2])}, {"v": np.array([3, 4, 5])})["v"]
    assert [list(value) for value in ragged] == [[1, 2], [3, 4, 5]]
    assert joined({"x": 1.0}, {"x": "lost"})["x"].tolist() == [1.0, "lost"]


SAME_KEYS = {
    "numbers": [{"x": 1.5, "n": 2, "ok": True}, {"x": 2.5, "n": 3, "ok": False}],
    "numpy's numbers": [
        {"x": np.float32(1), "n": np.int8(2)},
        {"x": np.float32(3), "n": np.int8(4)},
    ],
    "two kinds of float": [{"x": 0.5}, {"x": np.float64(1.5)}],
    "no key": [{}, {}],
}
OTHERS = {
    "keys that one row lacks": [{"x": 1.0}, {}],
    "another key": [{"x": 1.0}, {"y": 1.0}],
    "an integer beside a fraction": [{"x": 1}, {"x": 0.5}],
    "texts": [{"x": "a"}, {"x": "b"}],
    "arrays": [{"x": np.zeros(2)}, {"x": np.zeros(2)}],
    "nested": [{"x": {"y": 1.0}}, {"x": {"y": 2.0}}],
    "an integer beyond 64 bits": [{"x": 2**70}, {"x": 1}],
    "a key like a mask's": [{"_x": 1.0}, {"_x": 2.0}],
}


@pytest.mark.parametrize("case", SAME_KEYS)
def test_columns_of_numbers_are_what_row_after_row_makes(case):
    batch = {}
    assert add_infos(batch, SAME_KEYS[case])
    expected = joined(*SAME_KEYS[case])
    assert batch.keys() == expected.keys()
    for key, column in expected.items():
        assert batch[key].dtype == column.dtype
        assert batch[key].tolist() == column.tolist()


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_no_column_of_numbers_is_left_to_the_rows(case):
    batch = {}
    assert not add_infos(batch, OTHERS[case])
    assert not batch


def test_a_key_that_is_there_already_is_left_to_the_rows():
    batch = {"x": np.zeros(2)}
    assert not add_infos(batch, [{"x": 1.0}, {"x": 2.0}])
    assert batch["x"].tolist() == [0.0, 0.0]
