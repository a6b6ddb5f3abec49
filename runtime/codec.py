"""The wire format: msgpack for the structure, raw aligned bytes for the arrays.

A message is a frozen, slotted dataclass registered with `@message(type_number)`. A record
is what one message becomes on the wire:

    0   uint32  length of the record in bytes, a multiple of 64
    4   uint32  kind: 1 message, 2 message with arrays, 3 padding up to the end of the ring
    8   uint64  sequence number on its edge, from 0
    16  uint64  when it was sent, in nanoseconds of the host's monotonic clock
    24  uint32  CRC-32 of everything after the header, 0 where it is not computed
    28  uint32  length of the msgpack part
    32  msgpack: [type number, field, field, ...]
    ..  arrays, each from a multiple of 64, in the order of their fields

Where a field holds an array, the msgpack part holds its dtype and shape; the bytes are
written straight into the transport and read in place. Nothing here knows about transports.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import time
import types
import typing
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import msgpack
import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.errors import CodecError, RecordTooLarge, RingCorrupted

ALIGNMENT = 64
HEADER = struct.Struct("<IIQQII")
KIND_PLAIN, KIND_ARRAYS, KIND_PADDING = 1, 2, 3
MAX_RECORD_BYTES = 2**32 - ALIGNMENT

Array = NDArray[Any]
# Annotate a field with this alias where a message carries a variable number of arrays.
NamedArrays = dict[str, NDArray[Any]]

_DTYPES = tuple(np.dtype(code) for code in ("?", *(f"{k}{n}" for k in "iu" for n in (1, 2, 4, 8))))
_DTYPES += tuple(np.dtype(code) for code in ("f2", "f4", "f8"))
_DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}

M = TypeVar("M")


@dataclasses.dataclass(frozen=True, slots=True)
class Schema:
    """How one message class is laid out: which fields are plain, arrays, or messages."""

    number: int
    cls: type
    fields: tuple[str, ...]
    kinds: tuple[str, ...]
    """Per field "plain", "array", "named" (dict of arrays), "message" or "messages" (tuple)."""
    text: str
    """What the schema hash covers: name, fields and annotations."""


_SCHEMAS: dict[int, Schema] = {}
_NUMBERS: dict[type, int] = {}


@dataclass_transform(frozen_default=True)
def message(number: int) -> Callable[[type[M]], type[M]]:
    """Register a class as message type `number` and make it a frozen, slotted dataclass.

    Raises `CodecError` where the number is taken or a field's type cannot travel.
    """

    def register(cls: type[M]) -> type[M]:
        if number in _SCHEMAS:
            raise CodecError(f"message number {number} belongs to {_SCHEMAS[number].cls.__name__}")
        made = dataclasses.dataclass(frozen=True, slots=True, eq=False)(cls)
        schema = _describe(number, made)
        _SCHEMAS[number], _NUMBERS[made] = schema, number
        return made

    return register


def _describe(number: int, cls: type) -> Schema:
    hints = typing.get_type_hints(cls)
    names = tuple(field.name for field in dataclasses.fields(cls))
    kinds = tuple(_kind(cls, name, hints[name]) for name in names)
    text = f"{number}:{cls.__name__}(" + ",".join(f"{n}:{hints[n]}" for n in names) + ")"
    return Schema(number, cls, names, kinds, text)


_PLAIN = (int, float, str, bytes, bool, type(None))


def _is_array(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    # From numpy 2.5 on NDArray is a `type` alias, which hides what it stands for.
    aliased = typing.get_origin(getattr(origin, "__value__", None))
    return np.ndarray in (hint, origin, aliased)


def _kind(cls: type, name: str, hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if _is_array(hint):
        return "array"
    if origin is dict and len(args) == 2 and _is_array(args[1]):
        return "named"
    if hint in _NUMBERS:
        return "message"
    if origin is tuple and args and args[0] in _NUMBERS:
        return "messages"
    if _is_plain(hint):
        return "plain"
    raise CodecError(
        f"{cls.__name__}.{name}: {hint} cannot travel; use int, float, str, bytes, bool, None, "
        "tuples, lists and dicts of these, numpy arrays, or registered messages"
    )


def _is_plain(hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN or hint is Ellipsis or hint is Any or origin is typing.Literal:
        return True
    if origin in (tuple, list, dict, typing.Union, types.UnionType):
        return all(_is_plain(arg) for arg in args)
    return False


def schema_hashes() -> dict[int, str]:
    """A digest of every registered message class, by its number.

    Nodes compare those that both know before they exchange the first message.
    """
    return {
        number: hashlib.blake2b(schema.text.encode(), digest_size=8).hexdigest()
        for number, schema in _SCHEMAS.items()
    }


def _aligned(size: int) -> int:
    return (size + ALIGNMENT - 1) & -ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A message ready to be written: its msgpack part, its arrays, its length as a record."""

    meta: bytes
    arrays: list[Array]
    nbytes: int

    def write_into(
        self, target: memoryview, offset: int, sequence: int, checksum: bool = False
    ) -> None:
        """Write the record at `offset` of a writable byte view; nothing else is touched.

        The caller has checked that `nbytes` fit. Bytes between the parts keep their content.
        """
        start, meta = offset + HEADER.size, self.meta
        target[start : start + len(meta)] = meta
        at = offset + _aligned(HEADER.size + len(meta))
        for array in self.arrays:
            size = array.nbytes
            if size:
                target[at : at + size] = array.reshape(-1).view(np.uint8).data
            at += _aligned(size)
        crc = zlib.crc32(target[start : offset + self.nbytes]) if checksum else 0
        kind = KIND_ARRAYS if self.arrays else KIND_PLAIN
        sent = time.monotonic_ns()
        HEADER.pack_into(target, offset, self.nbytes, kind, sequence, sent, crc, len(meta))

    def to_bytes(self, sequence: int, checksum: bool = False) -> bytearray:
        """The record as bytes of its own, for transports without shared memory."""
        record = bytearray(self.nbytes)
        self.write_into(memoryview(record), 0, sequence, checksum)
        return record


def encode(value: Any) -> Encoded:
    """Turn a registered message into what the transports write; the arrays are not copied.

    Raises `CodecError` for an unregistered class, an unsupported dtype or a field that
    msgpack cannot pack, `RecordTooLarge` past 4 GiB.
    """
    arrays: list[Array] = []
    try:
        meta = msgpack.packb(_flatten(value, arrays), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"{type(value).__name__} cannot be packed: {error}") from error
    nbytes = _aligned(HEADER.size + len(meta)) + sum(_aligned(a.nbytes) for a in arrays)
    if nbytes > MAX_RECORD_BYTES:
        raise RecordTooLarge(f"{type(value).__name__} takes {nbytes} bytes; a record is < 4 GiB")
    return Encoded(meta, arrays, nbytes)


def _flatten(value: Any, arrays: list[Array]) -> list[Any]:
    number = _NUMBERS.get(type(value))
    if number is None:
        raise CodecError(f"{type(value).__name__} is not a registered message")
    schema = _SCHEMAS[number]
    row: list[Any] = [number]
    for name, kind in zip(schema.fields, schema.kinds, strict=True):
        field = getattr(value, name)
        if kind == "array":
            field = _describe_array(field, arrays)
        elif kind == "named":
            field = {key: _describe_array(array, arrays) for key, array in field.items()}
        elif kind == "message":
            field = _flatten(field, arrays)
        elif kind == "messages":
            field = [_flatten(item, arrays) for item in field]
        row.append(field)
    return row


def _describe_array(array: Any, arrays: list[Array]) -> list[int]:
    if not isinstance(array, np.ndarray) or array.dtype not in _DTYPE_NUMBER:
        raise CodecError(f"{type(array).__name__} {getattr(array, 'dtype', '')} cannot travel")
    arrays.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
    return [_DTYPE_NUMBER[array.dtype], *array.shape]


def decode(record: Any, expected_sequence: int, checksum: bool = False, offset: int = 0) -> Any:
    """Read one record from a buffer; arrays are read-only views that keep `record` alive.

    Raises `RingCorrupted` where the header contradicts what the edge must carry next, and
    `CodecError` where the msgpack part does not follow the schema.
    """
    nbytes, kind, sequence, _sent, crc, meta_length = HEADER.unpack_from(record, offset)
    if kind not in (KIND_PLAIN, KIND_ARRAYS) or sequence != expected_sequence:
        raise RingCorrupted(
            f"record {sequence} of kind {kind} where message {expected_sequence} was due"
        )
    start = offset + HEADER.size
    view = memoryview(record)
    if checksum and zlib.crc32(view[start : offset + nbytes]) != crc:
        raise RingCorrupted(f"record {sequence}: its checksum does not match its content")
    try:
        row = msgpack.unpackb(view[start : start + meta_length], use_list=False, raw=False)
    except ValueError as error:
        raise CodecError(f"record {sequence}: {error}") from error
    del view
    value, _ = _unflatten(row, record, offset + _aligned(HEADER.size + meta_length))
    return value


def _unflatten(row: Any, record: Any, at: int) -> tuple[Any, int]:
    schema = _SCHEMAS.get(row[0])
    if schema is None or len(row) != len(schema.fields) + 1:
        raise CodecError(f"no message of type {row[0]} with {len(row) - 1} fields is known here")
    values: list[Any] = []
    for kind, field in zip(schema.kinds, row[1:], strict=True):
        if kind == "array":
            field, at = _view_array(field, record, at)
        elif kind == "named":
            named = {}
            for key, description in field.items():
                named[key], at = _view_array(description, record, at)
            field = named
        elif kind == "message":
            field, at = _unflatten(field, record, at)
        elif kind == "messages":
            items = []
            for item in field:
                made, at = _unflatten(item, record, at)
                items.append(made)
            field = tuple(items)
        values.append(field)
    return schema.cls(*values), at


def _view_array(description: tuple[int, ...], record: Any, at: int) -> tuple[Array, int]:
    dtype, shape = _DTYPES[description[0]], description[1:]
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return np.empty(shape, dtype), at
    array = np.frombuffer(record, dtype, count, at)
    array.flags.writeable = False
    return array.reshape(shape), at + _aligned(array.nbytes)


def copied(value: M) -> M:
    """The same message with arrays of its own, for whoever keeps it past its lease."""
    schema = _SCHEMAS[_NUMBERS[type(value)]]
    fields = []
    for name, kind in zip(schema.fields, schema.kinds, strict=True):
        field = getattr(value, name)
        if kind == "array":
            field = field.copy()
        elif kind == "named":
            field = {key: array.copy() for key, array in field.items()}
        elif kind == "message":
            field = copied(field)
        elif kind == "messages":
            field = tuple(copied(item) for item in field)
        fields.append(field)
    return typing.cast(M, schema.cls(*fields))
