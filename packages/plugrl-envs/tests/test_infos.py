import numpy as np

from plugrl_envs.infos import add_info


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
