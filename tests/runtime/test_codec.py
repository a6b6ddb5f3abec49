"""Every message comes back as it was sent, and what does not follow the format is refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from nanoactor.runtime.codec import (
    INLINE_BYTES,
    NamedArrays,
    copy_arrays,
    decode,
    encode,
    message,
    schema_hashes,
)
from nanoactor.runtime.errors import CodecError, RingCorrupted


@message(950)
class Inner:
    name: str
    values: NDArray[np.float32]


@message(951)
class Outer:
    number: int
    text: str | None
    table: dict[str, float]
    ids: NDArray[np.int32]
    inner: Inner
    maybe: Inner | None
    many: tuple[Inner, ...]
    extra: NamedArrays


def equal(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=True)
    if dataclasses.is_dataclass(a):
        fields = [f.name for f in dataclasses.fields(a)]
        return all(equal(getattr(a, f), getattr(b, f)) for f in fields)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


arrays = npst.arrays(
    st.sampled_from([np.int32, np.int64, np.uint8, np.float32, np.bool_]),
    npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9),
)
floats = npst.arrays(np.float32, npst.array_shapes(max_dims=2, max_side=20))
inners = st.builds(Inner, st.text(max_size=50), floats)
outers = st.builds(
    Outer,
    st.integers(-(2**63), 2**64 - 1),
    st.none() | st.text(),
    st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False)),
    npst.arrays(np.int32, st.integers(0, 200)),
    inners,
    st.none() | inners,
    st.lists(inners, max_size=3).map(tuple),
    st.dictionaries(st.text(max_size=5), arrays, max_size=3),
)


@given(outers, st.integers(0, 2**64 - 1), st.booleans(), st.sampled_from([0, 16, INLINE_BYTES]))
def test_a_message_comes_back_as_it_was_sent(sent, sequence, checksum, inline):
    record = encode(sent, inline).to_bytes(sequence, checksum)
    assert len(record) % 64 == 0
    received = decode(record, sequence, checksum)
    assert equal(sent, received)
    assert equal(sent, copy_arrays(received))


def sample(**changes):
    inner = Inner("a", np.ones(3, np.float32))
    values = dict(number=1, text="x", table={}, ids=np.arange(5, dtype=np.int32), inner=inner)
    return Outer(**{**values, "maybe": None, "many": (), "extra": {}, **changes})


def test_arrays_are_aligned_read_only_views_of_the_record():
    record = encode(sample(), inline=0).to_bytes(0)
    ids = decode(record, 0).ids
    address = np.frombuffer(record, np.uint8).ctypes.data
    assert (ids.ctypes.data - address) % 64 == 0
    assert not ids.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1
    assert copy_arrays(decode(record, 0)).ids.flags.writeable


@pytest.mark.parametrize("inline", [0, INLINE_BYTES])
def test_a_copy_owns_all_arrays_of_the_messages_inside_it(inline):
    inner = Inner("a", np.ones(3, np.float32))
    record = encode(sample(maybe=inner, many=(inner,), extra={"b": inner.values}), inline)
    copy = copy_arrays(decode(record.to_bytes(0), 0))
    arrays = [copy.ids, copy.extra["b"]]
    arrays += [one.values for one in (copy.inner, copy.maybe, *copy.many)]
    assert all(array.flags.owndata and array.flags.writeable for array in arrays)


def test_a_small_array_is_read_only_and_needs_no_record():
    record = encode(sample()).to_bytes(0)
    ids = decode(record, 0).ids
    record[:] = bytes(len(record))
    assert ids.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_slices_and_transposed_arrays_travel_by_value():
    grid = np.arange(12, dtype=np.int32).reshape(3, 4)
    received = decode(encode(sample(ids=grid.T[1])).to_bytes(0), 0)
    assert received.ids.tolist() == [1, 5, 9]


def test_a_flipped_bit_is_found_by_the_checksum():
    record = encode(sample()).to_bytes(0, checksum=True)
    record[-40] ^= 1
    with pytest.raises(RingCorrupted, match="checksum"):
        decode(record, 0, checksum=True)


def test_a_record_out_of_sequence_is_refused():
    record = encode(sample()).to_bytes(7)
    with pytest.raises(RingCorrupted, match="record 7"):
        decode(record, 8)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"number": 2**70}, "cannot be packed"),
        ({"table": {"a": object()}}, "cannot be packed"),
        ({"ids": [1, 2]}, "list"),
        ({"ids": np.array(["a"])}, "cannot be sent"),
        ({"inner": "no message"}, "not a registered message"),
        ({"inner": None}, "NoneType is not a registered message"),
        ({"maybe": "no message"}, "str is not a registered message"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(changes, text):
    with pytest.raises(CodecError, match=text):
        encode(sample(**changes))


def test_classes_that_cannot_travel_are_refused_when_declared():
    with pytest.raises(CodecError, match="already used by Inner"):
        message(950)(type("Other", (), {"__annotations__": {"a": int}}))
    with pytest.raises(CodecError, match="cannot be sent"):
        message(952)(type("Other", (), {"__annotations__": {"a": object}}))
    with pytest.raises(CodecError, match="cannot be sent"):
        message(952)(type("Other", (), {"__annotations__": {"a": Inner | Outer}}))


def test_the_schema_hash_sees_number_names_and_types():
    def digest(number, name, annotations):
        message(number)(type(name, (), {"__annotations__": annotations}))
        return schema_hashes()[number]

    same = [digest(960, "A", {"a": int}), digest(961, "A", {"a": int})]
    others = [digest(962, "B", {"a": int}), digest(963, "A", {"a": str})]
    assert len({*same, *others}) == 4
