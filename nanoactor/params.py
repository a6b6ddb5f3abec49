"""Sampling parameters, named and meant as in vLLM and the OpenAI API."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

from nanoactor.errors import InvalidRequest
from nanoactor.outputs import RequestOutputKind

MAX_STOP_STRINGS, MAX_STOP_LENGTH, MAX_STOP_IDS = 64, 1024, 256


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters of a request: how to choose tokens, when to stop. None takes the model's default.

    Truncation follows transformers: temperature, then top-k, then top-p, then min-p, each on
    what the one before left. Raises `InvalidRequest` on construction, naming the value.
    """

    temperature: float | None = None
    """0 is greedy. Default: the model's `generation_config.json`, else 1."""
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1: no limit."""
    min_p: float | None = None
    """Drop tokens less likely than this share of the likeliest."""
    seed: int | None = None
    """Seed of the random numbers. Default: drawn when the request is submitted."""
    max_tokens: int | None = None
    """Default: as many as fit `max_model_len`."""
    min_tokens: int = 0
    """Tokens before which no end-of-sequence token, stop token or stop string ends the output."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        """Check every value and bring numbers, `stop` and `stop_token_ids` into their one form."""
        make_numbers_plain(self)
        _number("temperature", self.temperature, 0.0, 1e4)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _whole("top_k", self.top_k, -1)
        _whole("seed", self.seed, 0, 2**64 - 1)
        _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0, optional=False)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequest(
                f"output_kind must be a RequestOutputKind, got {self.output_kind!r}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))


# Counts and ids travel as int32.
_MOST = 2**31 - 1


_PLAIN = (bool, int, float, str, tuple, type(None))


def plain_number(value: Any) -> Any:
    """A number of another library's (numpy's, say) as Python's own; anything else as it is."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def make_numbers_plain(options: Any) -> None:
    """Give every field of a frozen dataclass its `plain_number`."""
    for name, value in list(vars(options).items()):
        if type(value) not in _PLAIN:
            object.__setattr__(options, name, plain_number(value))


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Not a number is not between anything, so NaN is refused here too.
    if not is_number or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(
            f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r}"
        )


def _whole(name: str, value: Any, low: int, high: int = _MOST, optional: bool = True) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, got {value}")


def _items(name: str, value: Any, what: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    try:
        return tuple(value)
    except TypeError:
        raise InvalidRequest(f"{name} must be a list of {what}, got {value!r}") from None


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _items("stop", stop, "strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop may hold {MAX_STOP_STRINGS} strings, got {len(strings)}")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(f"stop must hold non-empty strings, got {string!r}")
        if len(string) > MAX_STOP_LENGTH:
            raise InvalidRequest(f"a stop string may have {MAX_STOP_LENGTH} characters at most")
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"stop must be valid Unicode: {error}") from None
    return strings


def _stop_ids(ids: Any) -> tuple[int, ...]:
    found = _items("stop_token_ids", ids, "token ids")
    if len(found) > MAX_STOP_IDS:
        raise InvalidRequest(f"stop_token_ids may hold {MAX_STOP_IDS} ids, got {len(found)}")
    found = tuple(plain_number(token) for token in found)
    for token in found:
        _whole("stop_token_ids", token, 0, optional=False)
    return found
