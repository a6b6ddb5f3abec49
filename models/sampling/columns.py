"""Columns of per-request sampling parameters: a single declaration for messages, the host's table,
the state on the device and all views of it; imports no torch.

A row is sent as packed bytes, stored as `WORDS` int32 words, and read by column name.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def _column(dtype: str, neutral: float, fused: bool = True) -> dict[str, Any]:
    """Describe a column. Devices' fused samplers read `fused` columns; a row with a non-neutral
    value in another column is sampled by `nanoactor.models.sampling.sampler`."""
    return {"dtype": dtype, "neutral": neutral, "fused": fused}


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingColumns(Generic[T]):
    """One value, array or tensor for each column, named as in `SamplingParams`."""

    temperature: T = dataclasses.field(metadata=_column("float32", 1.0))
    """Temperature; 0 means greedy decoding."""
    top_k: T = dataclasses.field(metadata=_column("int32", 0))
    """Top-k; 0 means no limit."""
    top_p: T = dataclasses.field(metadata=_column("float32", 1.0))
    min_p: T = dataclasses.field(metadata=_column("float32", 0.0))
    presence_penalty: T = dataclasses.field(metadata=_column("float32", 0.0, fused=False))
    frequency_penalty: T = dataclasses.field(metadata=_column("float32", 0.0, fused=False))
    repetition_penalty: T = dataclasses.field(metadata=_column("float32", 1.0, fused=False))
    seed: T = dataclasses.field(metadata=_column("uint64", 0))
    """Seed; arrays and tensors hold the low words, then the high words, (2, rows)."""


_FORMATS = {"float32": "f", "int32": "i", "uint64": "Q"}
_FIELDS = dataclasses.fields(SamplingColumns)
_ROW = struct.Struct("<" + "".join(_FORMATS[field.metadata["dtype"]] for field in _FIELDS))
WORDS = _ROW.size // 4
"""Number of int32 words in a row."""
NAMES = tuple(field.name for field in _FIELDS)
NEUTRAL: dict[str, float] = {field.name: field.metadata["neutral"] for field in _FIELDS}
"""For each column, the value that has no effect."""
DEFAULTS = {name: neutral for name, neutral in NEUTRAL.items() if name != "seed"}
"""Columns that a model's `generation_config.json` may set, with their neutral values."""
UNFUSED = tuple(field.name for field in _FIELDS if not field.metadata["fused"])


def pack(values: Mapping[str, float]) -> bytes:
    """Pack a row into bytes; missing columns get their neutral values."""
    return _ROW.pack(*(values.get(name, neutral) for name, neutral in NEUTRAL.items()))


def split_rows(packed: bytes) -> list[bytes]:
    """Split the concatenated bytes of packed rows into rows."""
    return [packed[start : start + _ROW.size] for start in range(0, len(packed), _ROW.size)]


def unpack(row: bytes) -> SamplingColumns[float]:
    """Return the values of a packed row."""
    return SamplingColumns(*_ROW.unpack(row))


def column_views(words: T, float32: Any) -> SamplingColumns[T]:
    """Return views of int32 words, (WORDS, rows), by column; `float32` is the dtype of that name in
    NumPy or torch."""
    source: Any = words
    views, word = [], 0
    for field in _FIELDS:
        size = struct.calcsize(_FORMATS[field.metadata["dtype"]]) // 4
        view = source[word] if size == 1 else source[word : word + size]
        views.append(view.view(float32) if field.metadata["dtype"] == "float32" else view)
        word += size
    return SamplingColumns(*views)
