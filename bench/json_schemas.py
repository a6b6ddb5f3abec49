"""JSON schemas as applications have them; the longest answers are cut."""

from __future__ import annotations

from typing import Any


def _object(optional: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _text(length: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": length}


def _number(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _list(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_WEATHER = _object(
    ("unit", "days"),
    city=_text(60),
    country={"type": "string", "pattern": "^[A-Z]{2}$"},
    unit={"enum": ["celsius", "fahrenheit"]},
    days=_number(1, 14),
)
_CALL = _object(name={"const": "get_weather"}, arguments=_WEATHER)
_PERSON = _object(
    name=_text(80),
    age=_number(0, 150),
    email=_text(60),
    address=_object(street=_text(80), town=_text(60), code=_text(10)),
)
_TICKET = _object(
    category={"enum": ["billing", "technical", "account", "shipping", "other"]},
    priority={"enum": ["low", "normal", "high", "urgent"]},
    summary=_text(300),
    escalate={"type": "boolean"},
)
_ENTITIES = _object(
    entities=_list(
        _object(
            text=_text(40),
            kind={"enum": ["person", "organisation", "place", "date", "product"]},
            begin=_number(0, 100_000),
            end=_number(0, 100_000),
        ),
        2,
        8,
    )
)
_ORDER = _object(
    number=_text(20),
    items=_list(_object(article=_text(40), count=_number(1, 99), price=_number(1, 99_999)), 2, 6),
    shipping=_object(method={"enum": ["standard", "express"]}, to=_text(100)),
    paid={"type": "boolean"},
)
_STEPS = _object(
    steps=_list(_object(explanation=_text(120), result=_text(40)), 2, 5),
    answer=_text(60),
)
_SCORES = _object(
    scores=_list(_number(0, 100), 10, 40),
    labels=_list(_text(16), 5, 20),
    comment={"anyOf": [_text(200), {"type": "null"}]},
)
_TREE = {
    **_object(title=_text(40), parts={"$ref": "#/$defs/parts"}),
    "$defs": {
        "part": _object(("parts",), title=_text(40), parts={"$ref": "#/$defs/parts"}),
        "parts": _list({"$ref": "#/$defs/part"}, 0, 3),
    },
}

SCHEMAS = (_CALL, _PERSON, _TICKET, _ENTITIES, _ORDER, _STEPS, _SCORES, _TREE)
"""A call's arguments, nested objects, enums, arrays of objects, long texts, numbers, recursion."""
