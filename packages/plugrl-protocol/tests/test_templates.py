"""A template reads what it was made from and its like, and nothing else."""

import numpy as np
import pytest

from plugrl_protocol.codec import Decoder, decode, encode
from plugrl_protocol.errors import CodecError
from plugrl_protocol.templates import Slot, Stencil, Template, _record_of


def template_for(message):
    """Make the template of a message as a decoder does."""
    decoder = Decoder()
    frame = encode(message)
    decoder.decode(frame)
    decoder.decode(frame)
    return decoder.fitting


def message(number=0, flags=(False, False), text="pick", value=0.0):
    return {
        "kind": "x",
        "ids": np.array([4, 7]),
        "number": np.array([number]),
        "flags": np.array(flags),
        "text": np.array([text]),
        "rest": {"list": [1, np.full((2, 3), value), None], "none": {}},
        "big": np.array([value], ">f8"),
    }


def read(template, what):
    frame = encode(what)
    arrays = template.read(frame)
    return arrays, None if arrays is None else template.tree(arrays)


def plain(tree):
    """Make trees comparable."""
    if isinstance(tree, dict):
        return {key: plain(child) for key, child in tree.items()}
    if isinstance(tree, list):
        return [plain(child) for child in tree]
    return (tree.dtype, tree.tolist()) if isinstance(tree, np.ndarray) else tree


def test_it_reads_frames_that_differ_in_data():
    template = template_for(message())
    for what in (
        message(), message(number=1), message(value=2.5), message(flags=(True, False)),
        message(text="put."), message(3, (True, True), "none", -1.0),
    ):  # fmt: skip
        _, tree = read(template, what)
        assert plain(tree) == plain(decode(encode(what)))


def test_it_gives_none_for_another_form_of_the_same_length():
    template = template_for(message())
    for key, other in (("kind", "y"), ("ids", np.array([4.0, 7.0])), ("number", np.array([0.0]))):
        assert read(template, {**message(), key: other})[0] is None
    assert read(template, message())[0] is not None


def test_every_array_is_read_only():
    template = template_for(message())
    for what in (message(), message(number=1), message(number=2)):
        assert not any(array.flags.writeable for array in read(template, what)[0])


def test_small_arrays_of_indices_flags_and_text_are_handed_out_again():
    template = template_for(message())
    one, other = (read(template, message(value=value))[0] for value in (1.0, 2.0))
    same = [a is b for a, b in zip(one, other, strict=True)]
    assert same == [True, True, True, True, False, False]


def test_what_changes_often_is_read_each_time_and_what_changes_once_is_kept():
    template = template_for(message())
    for number in range(1, 20):
        arrays, tree = read(template, message(number))
        assert tree["number"].tolist() == [number]
    again, _ = read(template, message(19))
    assert again[1] is not arrays[1], "a number that counts"
    assert again[0] is arrays[0]

    arrays, tree = read(template, message(20, text="done"))
    assert tree["text"].tolist() == ["done"]
    one, other = (read(template, message(20, text="done"))[0] for _ in range(2))
    assert one[3] is other[3], "a text that changed once"


def test_content_is_checked_whether_it_was_pinned_or_not():
    template = template_for(message(text="aaaa"))
    for number in range(6):
        for flags in ((True, False), (False, True)):
            assert read(template, message(number, flags, "abcd"[number % 4] * 4))[0]
    frame = encode(message(text="aaaa", flags=(True, True)))
    for old, new in ((b"\x01\x01", b"\x01\x02"), (b"a\0\0\0", b"a\0\0\x70")):
        assert old in frame
        for reader in (template, template_for(message())):
            with pytest.raises(CodecError, match=r"boolean|Unicode"):
                reader.read(frame.replace(old, new, 1))
            assert reader.read(frame) is not None


def test_pinned_arrays_do_not_keep_their_frame():
    template = template_for({"a": np.array([1, 2]), "b": np.zeros(10_000)})
    kept = template.read(encode({"a": np.array([1, 2]), "b": np.ones(10_000)}))[0]
    assert len(kept.base) == 16


@pytest.mark.parametrize("dtype", [">i8", ">i4", "<i2", ">U4"])
def test_pinned_arrays_are_native_like_others(dtype):
    what = {"a": np.array(["a", "b"] if dtype[1] == "U" else [1, 2], dtype)}
    for array in (read(template_for(what), what)[0][0], decode(encode(what))["a"]):
        assert array.dtype == np.dtype(dtype).newbyteorder("=")
        assert array.tolist() == what["a"].tolist()
        assert not array.flags.writeable


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1,) * 32, (2**20, 0)])
def test_arrays_of_any_shape_are_laid_out(shape):
    what = {"a": np.zeros(shape, "<f4"), "b": np.ones((2, 3), "<f2")}
    template = template_for(what)
    for _ in range(2):
        one, two = template.read(encode(what))
        assert (one.shape, two.tolist()) == (shape, what["b"].tolist())


def test_what_numpy_has_no_record_for_is_read_slot_by_slot():
    assert _record_of([], 2**31) is None
    assert _record_of([(0, Slot(0, 0, np.dtype("<f4"), (0, 2**31)))], 10) is None
    frame = encode({"a": np.zeros((0, 3), "<f4"), "b": np.array([1.5])})
    huge = Slot(0, 0, np.dtype("u1"), (0, 2**32))
    start = frame.index(np.float64(1.5).tobytes())
    template = Template(
        frame,
        [huge, Slot(start, start + 8, np.dtype("<f8"), (1,))],
        {"a": np.zeros((0, 3)), "b": np.zeros(1)},
    )
    for _ in range(2):
        one, two = template.read(frame)
        assert one.shape == (0, 2**32)
        assert two.tolist() == [1.5]


def test_trees_share_no_container():
    template = template_for(message())
    frame = encode(message())
    first = template.tree(template.read(frame))
    first["rest"]["list"].append(1)
    first["rest"]["none"]["a"] = 1
    first["new"] = 1
    assert plain(template.tree(template.read(frame))) == plain(decode(frame))


def test_a_stencil_writes_what_it_was_made_from_and_its_like():
    like = {"kind": "x", "in": {"a": np.zeros((2, 3)), "b": np.array([True])}, "c": np.arange(2)}
    stencil = Stencil(like, template_for(like).between)
    other = {**like, "in": {"a": np.ones((2, 3)), "b": np.array([False])}}
    assert stencil.fill(like) == encode(like)
    assert stencil.fill(other) == encode(other)
    for change in ({"kind": "y"}, {"kind": 1}, {"c": None}, {"c": np.arange(3)}, {"in": None}):
        assert stencil.fill({**like, **change}) is None
    assert stencil.fill({"kind": "x"}) is None


@pytest.mark.parametrize("value", [1.5, [1], (1,), b"x", np.float32(1), np.str_("x")])
def test_a_stencil_is_not_made_of_what_could_be_written_in_several_ways(value):
    with pytest.raises(ValueError, match="a is a"):
        Stencil({"a": value}, [b""])
