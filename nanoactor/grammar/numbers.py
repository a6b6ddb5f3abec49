"""Checks for numbers in a schema that the parser would change: it stores them as binary64 (IEEE
754)."""

from __future__ import annotations

from typing import Any

from nanoactor.errors import InvalidRequest

MAX_EXACT = 2**53
"""Integers up to this one are represented exactly; some larger ones are not."""
_VALUES = ("const", "enum")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def check_numbers(part: dict[str, Any], field: str) -> None:
    """Raise `InvalidRequest` for a number in a schema's own keywords that cannot be enforced. With
    a bound of 2^53, the parser would accept some numbers beyond it."""
    for keyword in _VALUES:
        for number in _numbers_in(part.get(keyword)):
            if abs(number) > MAX_EXACT:
                raise _too_large(field, keyword, number)
    for keyword in _BOUNDS:
        for bound in _numbers_in(part.get(keyword)):
            if abs(bound) >= MAX_EXACT:
                raise _too_large(field, keyword, bound)


def _numbers_in(value: Any) -> list[int | float]:
    found: list[int | float] = []
    stack = [value]
    while stack:
        one = stack.pop()
        if _is_number(one):
            found.append(one)
        elif isinstance(one, list):
            stack += one
        elif isinstance(one, dict):
            stack += one.values()
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _too_large(field: str, keyword: str, number: int | float) -> InvalidRequest:
    shown = repr(number) if abs(number) < 10**40 else "with many digits"
    return InvalidRequest(
        f"{field}: {keyword} {shown} cannot be enforced, because numbers beyond 2^53 "
        "(9007199254740992) would be rounded; give such ids as strings"
    )
