"""Fields of a configuration's JSON, with errors that name them; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoactor.models.errors import ModelError

_MOST: dict[str, int] = {"vocab_size": 1 << 24, "max_position_embeddings": 1 << 30}
_MOST_ELSE = 1 << 20
_HUGE = 1e30
"""Upper bound of any model's sizes: larger ones are corrupt, and no allocator would take them."""


def positive(raw: Mapping[str, Any], key: str, origin: object, default: int | None = None) -> int:
    """Return a positive integer within the bound of any model's sizes."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{origin}: {key} must be a positive integer, got {value!r}")
    most = _MOST.get(key, _MOST_ELSE)
    if value > most:
        raise ModelError(f"{origin}: {key} must be {most} at most, got {value}")
    return value


def flag(raw: Mapping[str, Any], key: str, origin: object, default: bool) -> bool:
    """Return true or false."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"{origin}: {key} must be true or false, got {value!r}")
    return value


def number(raw: Mapping[str, Any], key: str, origin: object, default: float) -> float:
    """Return a finite number."""
    value = raw.get(key, default)
    value = default if value is None and key != "rms_norm_eps" else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"{origin}: {key} must be a number, got {value!r}")
    # Python's JSON parser accepts NaN, Infinity and integers of any length.
    if not -_HUGE < value < _HUGE:
        raise ModelError(f"{origin}: {key} must be a finite number, got {value!r:.50}")
    return float(value)


def positive_number(raw: Mapping[str, Any], key: str, origin: object, default: float) -> float:
    """Return a finite number above 0."""
    value = number(raw, key, origin, default)
    if value <= 0:
        raise ModelError(f"{origin}: {key} must be above 0, got {value:g}")
    return value


def at_least_0(raw: Mapping[str, Any], key: str, origin: object, default: float) -> float:
    """Return a finite number of 0 or more."""
    value = number(raw, key, origin, default)
    if value < 0:
        raise ModelError(f"{origin}: {key} must be 0 or more, got {value:g}")
    return value
