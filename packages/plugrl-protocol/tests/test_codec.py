"""The codec, against hand-written bytes, a naive twin (msgpack with hooks) and random trees."""

import contextlib
import math
import re

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugrl_protocol.codec import Decoder, Encoder, Limits, decode, encode
from plugrl_protocol.errors import CodecError

DTYPES = ["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"]


def twin_default(value):
    """What openpi's codec does, the slow way."""
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}


def twin_hook(value):
    if b"__ndarray__" in value:
        return np.ndarray(
            buffer=value[b"data"], dtype=np.dtype(value[b"dtype"]), shape=value[b"shape"]
        )
    if b"__npgeneric__" in value:
        return np.dtype(value[b"dtype"]).type(value[b"data"])
    return value


def twin_encode(message):
    return msgpack.packb(message, default=twin_default)


def array_map(data, dtype, shape, **more):
    """An array as a hostile peer may write it."""
    record = {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
    record.update({key.encode(): value for key, value in more.items()})
    return msgpack.packb({"x": record})


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (np.ndarray, np.generic)):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return one == other and type(one) is type(other)


def test_an_array_is_these_bytes():
    frame = encode({"a": np.array([1, 2], dtype="<i2")})

    assert frame == (
        b"\x81\xa1a\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x04\x01\x00\x02\x00"
        b"\xc4\x05dtype\xa3<i2\xc4\x05shape\x91\x02"
    )
    assert decode(frame)["a"].tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [*DTYPES, "<U3", ">f4", ">i8", ">U2"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 4), (2, 1, 2, 2), (300,)])
def test_every_allowed_array_is_encoded_like_openpi_and_comes_back(dtype, shape):
    rng = np.random.default_rng(0)
    array = np.array(rng.integers(0, 2, shape), dtype=dtype)

    frame = encode({"a": array})
    found = decode(frame)["a"]

    assert frame == twin_encode({"a": array})
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.shape == array.shape
    assert found.tolist() == array.tolist()
    assert not found.flags.writeable


def test_large_arrays_use_every_bin_header():
    for size in (200, 5_000, 70_000):
        array = np.arange(size) % 251
        array = array.astype(np.uint8)

        assert encode({"a": array}) == twin_encode({"a": array})
        assert decode(encode({"a": array}))["a"].tolist() == array.tolist()


@pytest.mark.parametrize("size", [8, 5_000])
def test_arrays_that_are_not_contiguous_travel_in_c_order(size):
    array = np.arange(2 * size, dtype="<f8").reshape(2, size).T

    assert not array.flags.c_contiguous
    assert decode(encode({"a": array}))["a"].tolist() == array.tolist()


def test_decoding_makes_no_copy():
    frame = encode({"a": np.arange(100, dtype="<f4"), "b": {"c": np.zeros((2, 5, 5, 3), "|u1")}})
    decoder = Decoder()
    raw = np.frombuffer(frame, np.uint8)

    for _ in range(3):  # the third reading goes by the template
        found = decoder.decode(frame)
        assert np.shares_memory(found["a"], raw)
        assert np.shares_memory(found["b"]["c"], raw)
        assert not found["a"].flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            found["a"][0] = 1


def test_a_frame_that_its_owner_could_change_is_copied():
    frame = bytearray(encode({"a": np.arange(3)}))

    found = decode(frame)["a"]
    frame[:] = bytes(len(frame))

    assert found.tolist() == [0, 1, 2]
    assert not found.flags.writeable


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=300),
)
ARRAYS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from([*DTYPES, "<U4"]),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 9),
)
GENERICS = st.sampled_from([np.float32(1.5), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True)])
TREES = st.recursive(
    st.one_of(SCALARS, ARRAYS, GENERICS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=40), inner, max_size=6)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=40), TREES, max_size=3))
@settings(deadline=None, max_examples=60)
def test_encoding_and_decoding_agree_with_the_twin(message):
    frame = encode(message)
    decoder = Decoder()

    assert frame == twin_encode(message)
    twin = msgpack.unpackb(frame, object_hook=twin_hook, strict_map_key=False)
    for _ in range(3):  # the third time by its template
        assert same(decoder.decode(frame), twin)


def test_float_subclasses_of_numpy_travel_as_floats_like_openpi():
    assert encode({"a": np.float64(2.5)}) == msgpack.packb({"a": 2.5})
    assert encode({"a": np.str_("x")}) == msgpack.packb({"a": "x"})


def test_tuples_become_lists_and_big_containers_work():
    message = {"t": (1, 2), "l": list(range(10_000)), "m": {str(i): i for i in range(100)}}

    assert encode(message) == twin_encode(message)
    assert decode(encode(message)) == {**message, "t": [1, 2]}


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.array([1j]),
        np.array([b"ab"]),
        np.zeros(2, "V3"),
        np.zeros(2, "M8[s]"),
        np.zeros(2, "m8[s]"),
        np.zeros(2, [("a", "<f4")]),
        np.zeros(2, np.longdouble),
        np.complex64(1),
        np.longdouble(1),
        {1: 2},
        {b"k": 2},
        object(),
        2**64,
        "\ud800",
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),
)
def test_encoding_refuses_what_has_no_place_on_the_wire(value):
    encoder = Encoder()

    with pytest.raises(CodecError):
        encoder.encode({"x": value})
    assert encoder.encode({"x": 1}) == msgpack.packb({"x": 1}), "and works afterwards"


def test_depth_is_bounded_alike_at_both_ends():
    def nest(depth, leaf):
        for level in range(depth):
            leaf = {"k": leaf} if level % 2 else [leaf]
        return {"root": leaf}

    assert decode(encode(nest(15, 1))) == nest(15, 1)
    with pytest.raises(CodecError, match="too deep"):
        encode(nest(16, 1))
    with pytest.raises(CodecError, match="too deep"):
        decode(msgpack.packb(nest(16, 1)))


def test_a_depth_bomb_is_refused_at_once():
    for opening in (b"\x91", b"\x81\xa1k", b"\xdc\x00\x01", b"\x81"):
        with pytest.raises(CodecError):
            decode(opening * 100_000)


def test_bombs_of_counts_are_refused_before_anything_is_built():
    bombs = [
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa1x\xc6\xff\xff\xff\xff",
        b"\x81\xa1x\xdb\xff\xff\xff\xff",
        b"\xdd\x00\x02\x00\x00" + b"\x00" * 0x20000,
        msgpack.packb({str(i): i for i in range(40_000)}),
    ]
    for bomb in bombs:
        with pytest.raises(CodecError):
            decode(bomb)
    assert len(decode(bombs[-1], Limits(max_nodes=80_000))) == 40_000


@pytest.mark.parametrize(
    "dtype",
    [
        "|O", "O", "<c8", "<c16", "|V8", "|S4", "<M8[s]", "<m8[s]", "<f16", "<f4,<f4", "f4", "=f4",
        "float32", "|f4", "<U0", "<U", "|U3", "<U9999999999", "<i3", "", "<U-1", "<U01",
        ["<f4"], b"<f4", 4, None, [["a", "<f4"]],
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("data", [b"", b"12345678"])
def test_decoding_refuses_every_dtype_that_is_not_listed(dtype, data):
    with pytest.raises(CodecError, match=r"dtype|too deep"):
        decode(array_map(data, dtype, [len(data) // 4]))


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        (b"1234", [2]),
        (b"12345", [1]),
        (b"", [1]),
        (b"1234", []),
        (b"1234", [-1]),
        (b"1234", [1, -1, -1]),
        (b"", [0, 2**40]),
        (b"", [2**62, 2**62, 0]),
        (b"", [0] * 33),
        (b"", [2**63, 2]),
        (b"12345678", [1.0]),
        (b"12345678", [True]),
        (b"12345678", ["1"]),
        (b"12345678", [[1]]),
        (b"12345678", 1),
        (b"12345678", {"a": 1}),
        (b"12345678", None),
        ("12345678", [1]),
        ([1], [1]),
        (5, [1]),
    ],
)
def test_decoding_refuses_lengths_and_shapes_that_do_not_fit(data, shape):
    with pytest.raises(CodecError):
        decode(array_map(data, "<f8", shape))


def test_decoding_refuses_maps_that_only_look_like_arrays():
    good = {b"__ndarray__": True, b"data": b"1234", b"dtype": "<f4", b"shape": [1]}
    bad = [
        {**good, b"more": 1},
        {**good, "more": 1},
        {**good, b"__ndarray__": False},
        {**good, b"__ndarray__": 1},
        {k: v for k, v in good.items() if k != b"shape"},
        {b"a": 1, b"b": 2, b"c": 3},
        {b"a": 1},
        {1: 2},
        {None: 2},
        {"a": 1, b"b": 2},
        {b"__ndarray__": True, "data": b"1234", b"dtype": "<f4", b"shape": [1]},
    ]
    for value in bad:
        with pytest.raises(CodecError):
            decode(msgpack.packb({"x": value}))
    lookalike = {"__ndarray__": True, "data": b"", "dtype": "|O", "shape": [1]}
    assert decode(msgpack.packb({"x": lookalike})) == {"x": lookalike}, "a plain map stays one"


def test_an_array_reads_in_any_key_order_and_header_width():
    items = {b"shape": [2], b"dtype": "<f4", b"data": b"\x00\x00\x80?\x00\x00\x00@"}
    reordered = msgpack.packb({"x": {**items, b"__ndarray__": True}})
    wide = (
        b"\x81\xa1x\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc6\x00\x00\x00\x08"
        + items[b"data"]
        + b"\xc4\x05dtype\xd9\x03<f4\xc4\x05shape\xdc\x00\x01\xcd\x00\x02"
    )
    very_wide_shape = wide.replace(b"\xd9\x03<f4", b"\xa3<f4")
    for frame in (reordered, wide, very_wide_shape):
        assert decode(frame)["x"].tolist() == [1.0, 2.0]


def test_an_array_repeating_a_key_is_refused():
    frame = (
        b"\x81\xa1x\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x04\x00\x00\x00\x00"
        b"\xc4\x04data\xc4\x04\x00\x00\x00\x00\xc4\x05shape\x91\x01"
    )
    with pytest.raises(CodecError):
        decode(frame)


def test_a_map_repeating_a_key_is_refused():
    with pytest.raises(CodecError, match="repeats"):
        decode(b"\x82\xa1a\x01\xa1a\x02")


def test_booleans_other_than_0_and_1_and_text_that_is_not_unicode_are_refused():
    with pytest.raises(CodecError, match="boolean"):
        decode(array_map(b"\x00\x02\x01", "|b1", [3]))
    for code in (b"\x00\x00\x11\x00", b"\x00\xd8\x00\x00"):
        with pytest.raises(CodecError, match="Unicode"):
            decode(array_map(code, "<U1", [1]))
        with pytest.raises(CodecError, match="Unicode"):
            decode(array_map(code[::-1], ">U1", [1]))
    with pytest.raises(CodecError, match="UTF-8"):
        decode(b"\xa1\xff")


def test_frames_of_a_known_form_have_their_content_checked():
    decoder = Decoder()
    flags = encode({"a": np.array([True, False])})
    words = encode({"a": np.array(["ab"])})
    for frame in (flags, words) * 2:
        decoder.decode(frame)
    assert len(decoder.templates) == 2
    with pytest.raises(CodecError, match="boolean"):
        decoder.decode(flags.replace(b"\xc4\x02\x01\x00", b"\xc4\x02\x01\x07"))
    with pytest.raises(CodecError, match="Unicode"):
        decoder.decode(words.replace(b"b\x00\x00\x00", b"b\x00\x00\x70"))


def test_the_second_frame_of_a_length_makes_a_template():
    decoder = Decoder()
    frame = encode({"a": np.array([1, 2], "|u1"), "b": [np.array([3], "|u1")]})
    decoder.decode(frame)
    assert decoder.fitting is None
    decoder.decode(frame)
    before, between, behind = decoder.fitting.between
    assert before + b"\x01\x02" + between + b"\x03" + behind == frame
    decoder.decode(frame)
    assert decoder.fitting is decoder.templates[len(frame)]
    with pytest.raises(CodecError):
        decoder.decode(frame[:-1])
    assert decoder.fitting is None


def test_a_template_never_serves_another_structure_of_the_same_length():
    decoder = Decoder()
    one = encode({"a": np.zeros((2, 3), "<f4"), "n": 1})
    others = [
        encode({"a": np.zeros((3, 2), "<f4"), "n": 1}),
        encode({"b": np.zeros((2, 3), "<f4"), "n": 1}),
        encode({"a": np.zeros((2, 3), "<i4"), "n": 1}),
        encode({"a": np.zeros((2, 3), "<f4"), "n": 2}),
    ]
    decoder.decode(one)
    decoder.decode(one)
    for other in others:
        assert len(other) == len(one)
        assert same(decoder.decode(other), decode(other))
        assert same(decoder.decode(one), decode(one))


def test_results_of_a_template_share_no_container():
    decoder = Decoder()
    frame = encode({"a": [1, {"b": np.zeros(2)}]})
    first = decoder.decode(frame)
    first["a"][1]["c"] = 1
    second = decoder.decode(frame)
    second["a"].append(2)

    assert same(decoder.decode(frame), decode(frame))


def test_many_structures_do_not_grow_the_decoder():
    decoder = Decoder()
    for size in range(100):
        decoder.decode(encode({"a": np.zeros(size, "|u1")}))
        assert not decoder.templates, "what comes once is not kept"
    assert len(decoder._lengths) <= 64
    for size in range(100):
        for _ in range(2):
            decoder.decode(encode({"a": np.zeros(size, "|u1")}))
    assert len(decoder.templates) == 64
    for _ in range(2):
        decoder.decode(encode({"a": list(range(1000))}))
    assert len(decoder.templates) == 64, "wide trees make no template"
    decoder = Decoder()
    for _ in range(2):
        decoder.decode(encode({"a": "x" * 100_000}))
        decoder.decode(encode([np.zeros(3)]))
    assert not decoder.templates, "nor long strings, nor what is no map"


def test_many_structures_do_not_grow_the_encoder():
    encoder = Encoder()
    for size in range(1100):
        assert encoder.encode({f"key{size}": np.zeros(size, "|u1")})
    assert len(encoder._around) <= 1024
    assert len(encoder._keys) <= 1024


def test_an_encoder_forgets_nothing_between_messages_but_its_data():
    encoder = Encoder()
    for value in (1, 2):
        message = {"a": np.full((2, 3), value, "<f4"), "b": {"a": np.full(2, value, "<i8")}}
        assert encoder.encode(message) == twin_encode(message)


def spoken(**changes):
    """A message like those of a session, with a chosen difference."""
    message = {
        "message_type": "x",
        "data": {"images": {}, "states": {"a": np.ones((2, 3), "<f4")}, "n": 1, "t": "pick"},
        "ids": np.arange(2),
        "flag": True,
        "none": None,
    }
    message.update(changes)
    return message


def test_a_known_form_is_encoded_like_an_unknown_one():
    encoder = Encoder()
    for value in range(5):
        message = spoken(ids=np.array([value, 7]))
        assert encoder.encode(message) == twin_encode(message)
    assert type(encoder._stencils["x"]).__name__ == "Stencil"
    data = spoken()["data"]
    for change in (
        {"ids": np.arange(3)}, {"ids": np.arange(2.0)}, {"ids": [0, 1]}, {"ids": None},
        {"flag": 1}, {"flag": False}, {"none": 0}, {"more": 1},
        {"data": {**data, "n": 2}}, {"data": {**data, "t": "put"}}, {"data": {**data, "n": True}},
        {"data": {**data, "n": 1.0}}, {"data": dict(reversed(data.items()))}, {"data": [1]},
        {"data": {**data, "states": {"b": np.ones((2, 3), "<f4")}}},
        {"data": {**data, "states": {"a": np.ones((3, 2), "<f4")}}},
        {"data": {**data, "states": {"a": np.ones((3, 2), "<f4").T}}},
        {"data": {**data, "states": {"a": np.ones((2, 3), ">f4")}}},
    ):  # fmt: skip
        message = spoken(**change)
        assert encoder.encode(message) == twin_encode(message)
        assert encoder.encode(spoken()) == twin_encode(spoken())
    with pytest.raises(CodecError):
        encoder.encode(spoken(ids=np.array([object()])))


def test_large_arrays_of_a_known_form_are_encoded_from_any_layout():
    encoder = Encoder()
    for turn in range(5):
        image = np.arange(2 * 90 * 90, dtype="|u1").reshape(2, 90, 90) + turn
        message = spoken(image=image.transpose(0, 2, 1) if turn % 2 else image)
        assert encoder.encode(message) == twin_encode(message)


def test_what_is_no_plain_map_makes_no_stencil():
    encoder = Encoder()
    for message in (
        spoken(message_type="float", rate=1.5), spoken(message_type="list", all=[np.zeros(2)]),
        spoken(message_type="scalar", one=np.float32(1)), spoken(message_type=np.arange(3)),
        {"a": b"bytes"},
    ):  # fmt: skip
        for _ in range(4):
            assert encoder.encode(message) == twin_encode(message)
    assert set(encoder._stencils.values()) == {None}
    for _ in range(3):
        assert encoder.encode([np.zeros(2)]) == twin_encode([np.zeros(2)])


def test_stencils_do_not_pile_up():
    encoder = Encoder()
    for number in range(50):
        for _ in range(2):
            encoder.encode(spoken(message_type=str(number)))
    assert len(encoder._stencils) == 16


def test_an_array_beyond_msgpack_is_refused():
    huge = np.broadcast_to(np.zeros(1, np.uint8), (2**32,))
    with pytest.raises(CodecError, match="4 GiB"):
        encode({"a": huge})


@pytest.mark.parametrize("code", [0xC1, 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8])
def test_extension_types_are_refused(code):
    with pytest.raises(CodecError, match="refused"):
        decode(bytes([code]) + b"\x01" * 40)


def test_every_truncation_and_every_trailing_byte_is_refused():
    frame = encode({"a": np.arange(3), "b": [1.5, -200, "text", None], "s": np.float32(1)})
    for end in range(len(frame)):
        with pytest.raises(CodecError):
            decode(frame[:end])
    with pytest.raises(CodecError, match="follow"):
        decode(frame + b"\x00")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("|u1", 256), ("|i1", -129), ("|u1", -1), ("|u1", 1.0), ("|b1", 1), ("<f4", 1e300),
        ("<f4", True), ("<f4", "1"), ("<i4", True), ("<U1", "a"), ("|O", 1), ("<i8", None),
    ],
)  # fmt: skip
def test_scalars_that_do_not_fit_their_dtype_are_refused(dtype, value):
    record = {b"__npgeneric__": True, b"data": value, b"dtype": dtype}
    with pytest.raises(CodecError):
        decode(msgpack.packb({"x": record}))


def test_scalars_of_any_order_come_back():
    for dtype, value in ((">f4", 1.5), ("<i8", -3), ("|b1", True), ("<f4", math.inf), ("<f8", 3)):
        record = {b"dtype": dtype, b"data": value, b"__npgeneric__": True}
        found = decode(msgpack.packb({"x": record}))["x"]
        assert found == value
        assert found.dtype == np.dtype(dtype).newbyteorder("=")


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=500)
def test_garbage_decodes_to_values_or_raises_codec_errors(garbage):
    with contextlib.suppress(CodecError):
        decode(garbage)


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_flipped_bytes_decode_like_a_fresh_decoder_would(data):
    frame = bytearray(
        encode({"a": np.zeros((2, 3), "<f4"), "t": np.array(["ab"]), "f": np.array([True])})
    )
    decoder = Decoder()
    decoder.decode(bytes(frame))
    decoder.decode(bytes(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))

    def outcome(read):
        try:
            return read(bytes(frame))
        except CodecError:
            return "refused"

    one, other = outcome(decoder.decode), outcome(decode)
    assert same(one, other)
