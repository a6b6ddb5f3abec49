"""Per-request sampling parameters, each of which is a column of a table. Messages, the host's
table, the device's table and all views are derived from this one declaration. Imports no torch.

The parameters of a request are sent as packed bytes, stored as `WORDS` int32 words, and read by
column name.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def _column(dtype: str, neutral: float, fused: bool = True) -> dict[str, Any]:
    """Return the metadata of a column. `neutral` is the value that has no effect.

    Devices' fused samplers read only `fused` columns. A row with another value than `neutral` in a
    column that is not fused is sampled by `nanoactor.models.sampling.sampler`.
    """
    return {"dtype": dtype, "neutral": neutral, "fused": fused}


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingColumns(Generic[T]):
    """One value, array or tensor for each sampling parameter. The field names are those of
    `SamplingParams`."""

    temperature: T = dataclasses.field(metadata=_column("float32", 1.0))
    """Temperature. 0 means greedy decoding."""
    top_k: T = dataclasses.field(metadata=_column("int32", 0))
    """Number of most likely tokens to sample from. 0 means no limit."""
    top_p: T = dataclasses.field(metadata=_column("float32", 1.0))
    min_p: T = dataclasses.field(metadata=_column("float32", 0.0))
    presence_penalty: T = dataclasses.field(metadata=_column("float32", 0.0, fused=False))
    frequency_penalty: T = dataclasses.field(metadata=_column("float32", 0.0, fused=False))
    repetition_penalty: T = dataclasses.field(metadata=_column("float32", 1.0, fused=False))
    seed: T = dataclasses.field(metadata=_column("uint64", 0))
    """Seed of the random numbers. Arrays and tensors are (2, rows): the low words, then the high
    words."""


_FORMATS = {"float32": "f", "int32": "i", "uint64": "Q"}
_FIELDS = dataclasses.fields(SamplingColumns)
_ROW = struct.Struct("<" + "".join(_FORMATS[field.metadata["dtype"]] for field in _FIELDS))
WORDS = _ROW.size // 4
"""Number of int32 words that the parameters of one request take."""
NAMES = tuple(field.name for field in _FIELDS)
NEUTRAL: dict[str, float] = {field.name: field.metadata["neutral"] for field in _FIELDS}
"""Neutral value of each column (the value that has no effect), by column name."""
DEFAULTS = {name: neutral for name, neutral in NEUTRAL.items() if name != "seed"}
"""Neutral values of the columns that a model's `generation_config.json` may set, by name."""
UNFUSED = tuple(field.name for field in _FIELDS if not field.metadata["fused"])


def pack(values: Mapping[str, float]) -> bytes:
    """Return the parameters of one request as packed bytes. Missing columns get their neutral
    values."""
    return _ROW.pack(*(values.get(name, neutral) for name, neutral in NEUTRAL.items()))


def split_rows(packed: bytes) -> list[bytes]:
    """Split the concatenated bytes of several requests into the packed bytes of each request."""
    return [packed[start : start + _ROW.size] for start in range(0, len(packed), _ROW.size)]


def unpack(row: bytes) -> SamplingColumns[float]:
    """Return the parameters in one request's packed bytes."""
    return SamplingColumns(*_ROW.unpack(row))


def column_views(words: T, float32: Any) -> SamplingColumns[T]:
    """Return views of `words`, int32 (WORDS, rows), one for each parameter: (rows,) each, and (2,
    rows) for the seed.

    `float32` is NumPy's or torch's dtype of that name.
    """
    source: Any = words
    views, word = [], 0
    for field in _FIELDS:
        size = struct.calcsize(_FORMATS[field.metadata["dtype"]]) // 4
        view = source[word] if size == 1 else source[word : word + size]
        views.append(view.view(float32) if field.metadata["dtype"] == "float32" else view)
        word += size
    return SamplingColumns(*views)
