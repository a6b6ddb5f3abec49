"""Validated access to the fields of a JSON configuration; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoactor.models.errors import ModelError

_MOST: dict[str, int] = {"vocab_size": 1 << 24, "max_position_embeddings": 1 << 30}
_MOST_ELSE = 1 << 20
"""Upper bound on all other sizes: larger ones are corrupt, and could not be allocated."""
_HUGE = 1e30
"""Upper bound on the magnitude of numbers that are not sizes."""


def positive(raw: Mapping[str, Any], key: str, origin: object, default: int | None = None) -> int:
    """Return the value of `key`: a positive integer within the upper bound of sizes."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{origin}: {key} must be a positive integer, got {value!r}")
    most = _MOST.get(key, _MOST_ELSE)
    if value > most:
        raise ModelError(f"{origin}: {key} must be at most {most}, got {value}")
    return value


def flag(raw: Mapping[str, Any], key: str, origin: object, default: bool) -> bool:
    """Return the boolean value of `key`, or `default` if it is missing."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"{origin}: {key} must be true or false, got {value!r}")
    return value


def number(raw: Mapping[str, Any], key: str, origin: object, default: float) -> float:
    """Return the value of `key`: a finite number."""
    value = raw.get(key, default)
    value = default if value is None and key != "rms_norm_eps" else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"{origin}: {key} must be a number, got {value!r}")
    # Python's JSON parser accepts NaN, Infinity and integers of any length.
    if not -_HUGE < value < _HUGE:
        raise ModelError(f"{origin}: {key} must be a finite number, got {value!r:.50}")
    return float(value)


def positive_number(raw: Mapping[str, Any], key: str, origin: object, default: float) -> float:
    """Return the value of `key`: a finite number above 0."""
    value = number(raw, key, origin, default)
    if value <= 0:
        raise ModelError(f"{origin}: {key} must be greater than 0, got {value:g}")
    return value


def at_least_0(raw: Mapping[str, Any], key: str, origin: object, default: float) -> float:
    """Return the value of `key`: a finite number of at least 0."""
    value = number(raw, key, origin, default)
    if value < 0:
        raise ModelError(f"{origin}: {key} must be at least 0, got {value:g}")
    return value
