"""Checks of numbers in a schema. The parser stores numbers as binary64 (IEEE 754) and would change
some of them."""

from __future__ import annotations

from typing import Any

from nanoactor.errors import InvalidRequest

MAX_EXACT = 2**53
"""Up to this value, all integers are exact in binary64; some larger ones are not."""
_VALUES = ("const", "enum")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def check_numbers(part: dict[str, Any], field: str) -> None:
    """Raise `InvalidRequest`, naming `field`, if a number in the keywords of one schema exceeds
    2^53 in magnitude. A bound of exactly 2^53 is also rejected, since rounding would make the
    parser accept some numbers beyond it."""
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
