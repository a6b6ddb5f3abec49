"""Functions that read and validate fields of a JSON configuration. Imports no torch.

They raise `ModelError` for an invalid value. `origin` names the file in the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoactor.models.errors import ModelError

_MAX_SIZES: dict[str, int] = {"vocab_size": 1 << 24, "max_position_embeddings": 1 << 30}
_MAX_OTHER_SIZE = 1 << 20
"""Upper limit of all other sizes. Larger values indicate a corrupt file and could not be
allocated."""
_MAGNITUDE_LIMIT = 1e30
"""Upper limit of the magnitude of numbers that are not sizes."""


def read_positive_int(
    raw: Mapping[str, Any], key: str, origin: object, default: int | None = None
) -> int:
    """Return the value of `key`, a positive integer that does not exceed the maximum for this key.

    A missing or null value means `default`, and is an error if that is None.
    """
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{origin}: {key} must be a positive integer, got {value!r}")
    maximum = _MAX_SIZES.get(key, _MAX_OTHER_SIZE)
    if value > maximum:
        raise ModelError(f"{origin}: {key} must be at most {maximum}, got {value}")
    return value


def read_bool(raw: Mapping[str, Any], key: str, origin: object, default: bool) -> bool:
    """Return the boolean value of `key`. A missing or null value means `default`."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"{origin}: {key} must be true or false, got {value!r}")
    return value


def read_number(raw: Mapping[str, Any], key: str, origin: object, default: float) -> float:
    """Return the value of `key`, a finite number. A missing or null value means `default`, but
    `rms_norm_eps` must not be null."""
    value = raw.get(key, default)
    value = default if value is None and key != "rms_norm_eps" else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"{origin}: {key} must be a number, got {value!r}")
    # Python's JSON parser accepts NaN, Infinity and integers of any length.
    if not -_MAGNITUDE_LIMIT < value < _MAGNITUDE_LIMIT:
        raise ModelError(f"{origin}: {key} must be a finite number, got {value!r:.50}")
    return float(value)


def read_positive_number(raw: Mapping[str, Any], key: str, origin: object, default: float) -> float:
    """Return the value of `key`, a finite number greater than 0, with the default as in
    `read_number`."""
    value = read_number(raw, key, origin, default)
    if value <= 0:
        raise ModelError(f"{origin}: {key} must be greater than 0, got {value:g}")
    return value


def read_non_negative_number(
    raw: Mapping[str, Any], key: str, origin: object, default: float
) -> float:
    """Return the value of `key`, a finite number of at least 0, with the default as in
    `read_number`."""
    value = read_number(raw, key, origin, default)
    if value < 0:
        raise ModelError(f"{origin}: {key} must be at least 0, got {value:g}")
    return value
