"""The wire format: msgpack for the structure, raw aligned bytes for the arrays.

A message is a frozen, slotted dataclass registered with `@message(type_number)`. A record is
one message in its wire format:

    0   uint32  length of the record in bytes, a multiple of 64
    4   uint32  kind: 1 message, 2 message with arrays, 3 padding up to the end of the ring
    8   uint64  sequence number on its edge, from 0
    16  uint64  time of sending, in nanoseconds of the host's monotonic clock
    24  uint32  CRC-32 of everything after the header, 0 if it is not computed
    28  uint32  length of the msgpack part
    32  msgpack: [type number, field, field, ...]
    ..  arrays, each starting at a multiple of 64, in the order of their fields

If a field holds an array, the msgpack part holds its dtype and shape, and the bytes are written
straight into the transport and read in place. A small array is stored in the msgpack part instead:
copying it twice costs less than tracking how long it is read in place, and most messages of a
running engine are small. This module does not depend on any transport.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import operator
import struct
import time
import types
import typing
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, dataclass_transform

import msgpack
import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.errors import CodecError, RecordTooLarge, RingCorrupted, SchemaMismatch

ALIGNMENT = 64
HEADER = struct.Struct("<IIQQII")
HEADER_SIZE = HEADER.size
KIND_PLAIN, KIND_ARRAYS, KIND_PADDING = 1, 2, 3
_KINDS = (KIND_PLAIN, KIND_ARRAYS)
MAX_RECORD_BYTES = 2**32 - ALIGNMENT
INLINE_BYTES = 8192
"""Largest size in bytes of arrays that are sent inside the msgpack part."""

Array = NDArray[Any]
# Annotation for a message field that holds a variable number of arrays.
NamedArrays = dict[str, NDArray[Any]]

_DTYPES = tuple(np.dtype(code) for code in ("?", *(f"{k}{n}" for k in "iu" for n in (1, 2, 4, 8))))
_DTYPES += tuple(np.dtype(code) for code in ("f2", "f4", "f8"))
_DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}
_EMPTY = tuple(np.empty(0, dtype) for dtype in _DTYPES)
for _array in _EMPTY:
    _array.flags.writeable = False

M = TypeVar("M")


@dataclasses.dataclass(frozen=True, slots=True)
class Schema:
    """The layout of one message class, as the encoder and the decoder use it."""

    number: int
    cls: type
    fields: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kind of each field: "plain", "array", "named" (dict of arrays), "message", "optional" (a
    message or None) or "messages" (a tuple of messages)."""
    text: str
    """Text from which the schema hash is computed: number, class name, fields and annotations."""
    values: Callable[[Any], tuple[Any, ...]]
    """Function that returns the values of all fields of a message."""
    special: tuple[tuple[int, str], ...]
    """(position in the msgpack row, kind) of each field that is not plain. Position 0 is the type
    number."""
    by: str
    """Name of the integer field by which traces link this message's spans to others; empty if there
    is none."""


_SCHEMAS: dict[int, Schema] = {}
_NUMBERS: dict[type, int] = {}


@dataclass_transform(frozen_default=True)
def message(number: int, by: str = "") -> Callable[[type[M]], type[M]]:
    """Return a class decorator that registers a class as message type `number` and makes it a
    frozen, slotted dataclass.

    `by` names an integer field; spans with the same value of that field are linked in traces.
    Raises `CodecError` if the number is taken or a field's type cannot be sent.
    """

    def register(cls: type[M]) -> type[M]:
        if number in _SCHEMAS:
            raise CodecError(
                f"message number {number} is already used by {_SCHEMAS[number].cls.__name__}"
            )
        decorated = dataclasses.dataclass(frozen=True, slots=True, eq=False)(cls)
        schema = _describe(number, decorated, by)
        _SCHEMAS[number], _NUMBERS[decorated] = schema, number
        return decorated

    return register


def _describe(number: int, cls: type, by: str) -> Schema:
    hints = typing.get_type_hints(cls)
    names = tuple(field.name for field in dataclasses.fields(cls))
    kinds = tuple(_kind(cls, name, hints[name]) for name in names)
    text = f"{number}:{cls.__name__}(" + ",".join(f"{n}:{hints[n]}" for n in names) + ")"
    getter = operator.attrgetter(*names) if names else lambda value: ()
    values = getter if len(names) != 1 else lambda value: (getter(value),)
    special = tuple((at, kind) for at, kind in enumerate(kinds, 1) if kind != "plain")
    if by and hints.get(by) is not int:
        raise CodecError(
            f"{cls.__name__}: traces must be linked by a field of type int, not by {by!r}"
        )
    return Schema(number, cls, names, kinds, text=text, values=values, special=special, by=by)


def linked_by(cls: type) -> tuple[str, Callable[[Any], int]]:
    """Return the name of the integer field that links spans of a message class in traces, and a
    function that reads the field from a message. For a class without such a field, return "" and a
    function that returns 0."""
    by = _SCHEMAS[_NUMBERS[cls]].by if cls in _NUMBERS else ""
    return by, operator.attrgetter(by) if by else _zero


def _zero(value: Any) -> int:
    return 0


_PLAIN = (int, float, str, bytes, bool, type(None))


def _is_array(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    # From numpy 2.5 on, NDArray is a `type` alias, which hides the aliased type.
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
    optional = origin in (typing.Union, types.UnionType) and args[1:] == (type(None),)
    if optional and args[0] in _NUMBERS:
        return "optional"
    if origin is tuple and args and args[0] in _NUMBERS:
        return "messages"
    if _is_plain(hint):
        return "plain"
    raise CodecError(
        f"{cls.__name__}.{name}: {hint} cannot be sent; use int, float, str, bytes, bool, None, "
        "tuples, lists and dicts of these, numpy arrays, or registered messages, which may be None"
    )


def _is_plain(hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN or hint is Ellipsis or hint is Any or origin is typing.Literal:
        return True
    if origin in (tuple, list, dict, typing.Union, types.UnionType):
        return all(_is_plain(arg) for arg in args)
    return False


def schema_hashes() -> dict[int, str]:
    """Return a digest of the layout of every registered message class, by message number.

    Before two processes exchange messages, the digests of the classes that both have registered are
    compared.
    """
    return {
        number: hashlib.blake2b(schema.text.encode(), digest_size=8).hexdigest()
        for number, schema in _SCHEMAS.items()
    }


def _aligned(size: int) -> int:
    return (size + ALIGNMENT - 1) & -ALIGNMENT


class Encoded:
    """An encoded message: its msgpack part, its large arrays, and the size of its record in
    bytes."""

    __slots__ = ("arrays", "meta", "nbytes")

    def __init__(self, meta: bytes, arrays: list[Array], nbytes: int) -> None:
        self.meta = meta
        self.arrays = arrays
        self.nbytes = nbytes

    def write_into(
        self, target: memoryview, offset: int, sequence: int, checksum: bool = False
    ) -> int:
        """Write the record at `offset` of a writable byte view.

        Returns the send time that was stored in the record, in ns of the monotonic clock. The
        caller must have checked that `nbytes` bytes fit. Nothing outside the record is written, and
        padding bytes between its parts keep their old content.
        """
        start, meta = offset + HEADER.size, self.meta
        target[start : start + len(meta)] = meta
        if self.arrays:
            position = offset + _aligned(HEADER.size + len(meta))
            for array in self.arrays:
                size = array.nbytes
                target[position : position + size] = array.reshape(-1).view(np.uint8).data
                position += _aligned(size)
        crc = zlib.crc32(target[start : offset + self.nbytes]) if checksum else 0
        kind = KIND_ARRAYS if self.arrays else KIND_PLAIN
        sent = time.monotonic_ns()
        HEADER.pack_into(target, offset, self.nbytes, kind, sequence, sent, crc, len(meta))
        return sent

    def to_bytes(self, sequence: int, checksum: bool = False) -> bytearray:
        """Return the record in a new buffer, for transports without shared memory."""
        record = bytearray(self.nbytes)
        self.write_into(memoryview(record), 0, sequence, checksum)
        return record


def encode(value: Any, inline: int = INLINE_BYTES) -> Encoded:
    """Encode a registered message for a transport.

    Arrays of up to `inline` bytes are stored in the msgpack part. Larger arrays are referenced, not
    copied. Raises `CodecError` for an unregistered class, an unsupported dtype or a field that
    msgpack cannot pack, and `RecordTooLarge` for a record of 4 GiB or more.
    """
    arrays: list[Array] = []
    try:
        meta = _pack(_flatten(value, arrays, inline))
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"{type(value).__name__} cannot be packed: {error}") from error
    nbytes = _aligned(HEADER.size + len(meta))
    for array in arrays:
        nbytes += _aligned(array.nbytes)
    if nbytes > MAX_RECORD_BYTES:
        raise RecordTooLarge(f"{type(value).__name__} takes {nbytes} bytes, but the limit is 4 GiB")
    return Encoded(meta, arrays, nbytes)


_pack = functools.partial(msgpack.packb, use_bin_type=True)
_unpack = functools.partial(msgpack.unpackb, use_list=False, raw=False)


def _flatten(value: Any, arrays: list[Array], inline: int) -> list[Any]:
    number = _NUMBERS.get(type(value))
    if number is None:
        raise CodecError(f"{type(value).__name__} is not a registered message")
    schema = _SCHEMAS[number]
    row = [number, *schema.values(value)]
    for at, kind in schema.special:
        field = row[at]
        if kind == "array":
            row[at] = _describe_array(field, arrays, inline)
        elif kind == "named":
            row[at] = {key: _describe_array(a, arrays, inline) for key, a in field.items()}
        elif kind == "optional" and field is None:
            continue
        elif kind in ("message", "optional"):
            row[at] = _flatten(field, arrays, inline)
        else:
            row[at] = [_flatten(item, arrays, inline) for item in field]
    return row


def _describe_array(array: Any, arrays: list[Array], inline: int) -> Any:
    """Return what the msgpack part stores for an array, in one of the three forms that
    `_read_array` describes. Append a large array to `arrays`."""
    number = _DTYPE_NUMBER.get(array.dtype) if isinstance(array, np.ndarray) else None
    if number is None:
        dtype = getattr(array, "dtype", None)
        raise CodecError(f"a value of type {type(array).__name__} and dtype {dtype} cannot be sent")
    size = array.nbytes
    if size <= inline or not size or not array.ndim:
        if not size and array.ndim == 1:
            return number
        return (number, array.tobytes(), *array.shape)
    arrays.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
    return (number, *array.shape)


def decode(record: Any, expected_sequence: int, checksum: bool = False) -> Any:
    """Return the message in a record. The message's large arrays are read-only views that keep the
    record's buffer alive.

    Raises `RingCorrupted` if the sequence number, kind or checksum of the record is wrong, and
    `CodecError` if the msgpack part does not follow the schema. The checksum is verified only if
    `checksum` is True.
    """
    header = HEADER.unpack_from(record)
    return decode_body(record, memoryview(record), header, expected_sequence, checksum, offset=0)


def decode_body(
    record: Any,
    view: memoryview,
    header: tuple[int, ...],
    expected_sequence: int,
    checksum: bool,
    offset: int,
) -> Any:
    """Return the message in a record, like `decode`, but with the header already unpacked.

    `record` is a buffer that contains the record at byte `offset`. Large arrays become views of
    this buffer. `view` is a memoryview of the same buffer.
    """
    nbytes, kind, sequence, _sent, crc, meta_length = header
    if sequence != expected_sequence or kind not in _KINDS:
        raise RingCorrupted(
            f"found record {sequence} of kind {kind} instead of message {expected_sequence}"
        )
    start = offset + HEADER_SIZE
    if checksum and zlib.crc32(view[start : offset + nbytes]) != crc:
        raise RingCorrupted(f"record {sequence}: its checksum does not match its content")
    try:
        row = _unpack(view[start : start + meta_length])
    except ValueError as error:
        raise CodecError(f"record {sequence}: {error}") from error
    del view
    value, _ = _unflatten(row, record, offset + _aligned(HEADER_SIZE + meta_length))
    return value


def _unflatten(row: Any, record: Any, at: int) -> tuple[Any, int]:
    schema = _SCHEMAS.get(row[0])
    if schema is None or len(row) != len(schema.fields) + 1:
        raise CodecError(f"no message of type {row[0]} with {len(row) - 1} fields is registered")
    if not schema.special:
        return schema.cls(*row[1:]), at
    values = list(row)
    for position, kind in schema.special:
        field = row[position]
        if kind == "array":
            values[position], at = _read_array(field, record, at)
        elif kind == "named":
            named = {}
            for key, description in field.items():
                named[key], at = _read_array(description, record, at)
            values[position] = named
        elif kind == "optional" and field is None:
            continue
        elif kind in ("message", "optional"):
            values[position], at = _unflatten(field, record, at)
        else:
            items = []
            for item in field:
                made, at = _unflatten(item, record, at)
                items.append(made)
            values[position] = tuple(items)
    del values[0]
    return schema.cls(*values), at


def _read_array(description: Any, record: Any, at: int) -> tuple[Array, int]:
    """Return an array and the byte offset at which the next one starts.

    `description` is the dtype's number for an empty 1-D array, (number, bytes, *shape) for an
    inline array, and (number, *shape) for an array whose bytes start at offset `at` of `record`.
    """
    if type(description) is int:
        return _EMPTY[description], at
    number, second, *shape = description
    if type(second) is bytes:
        array: Array = np.frombuffer(second, _DTYPES[number])
        return (array if len(shape) == 1 else array.reshape(shape)), at
    count = math.prod(description[1:])
    array = np.frombuffer(record, _DTYPES[number], count, at)
    array.flags.writeable = False
    at += _aligned(array.nbytes)
    return (array.reshape(description[1:]) if shape else array), at


def copy_arrays(value: M) -> M:
    """Return a copy of a message in which all arrays own their memory. The copy stays valid after
    the original's memory is reused."""
    schema = _SCHEMAS[_NUMBERS[type(value)]]
    fields = []
    for name, kind in zip(schema.fields, schema.kinds, strict=True):
        field = getattr(value, name)
        if kind == "array":
            field = field.copy()
        elif kind == "named":
            field = {key: array.copy() for key, array in field.items()}
        elif kind == "message" or (kind == "optional" and field is not None):
            field = copy_arrays(field)
        elif kind == "messages":
            field = tuple(copy_arrays(item) for item in field)
        fields.append(field)
    return typing.cast(M, schema.cls(*fields))


def check_schema(node: str, theirs: Mapping[int, str]) -> None:
    """Raise `SchemaMismatch` if the process of `node` lays out a message differently from this one.
    `theirs` are the schema hashes of that process. Classes that only one process has registered are
    ignored."""
    ours = schema_hashes()
    differing = [number for number in theirs if ours.get(number, theirs[number]) != theirs[number]]
    if differing:
        raise SchemaMismatch(
            f"node {node} lays out the messages {differing} differently from this process: "
            "the node runs a different version of the code"
        )
