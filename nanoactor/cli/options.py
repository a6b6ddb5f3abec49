"""Command-line options generated from dataclasses: names, types, defaults and help texts are taken
from the fields."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import decimal
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

_SCALAR_TYPES = (int, float, str)
_INTEGER_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")
_MULTI_VALUE_FIELDS = ("served_model_name",)
"""Options that accept several values in a row, as in vLLM. A model name directly after such an
option is read as one of its values."""
_DESCRIPTION_CACHE: dict[Any, dict[str, str]] = {}
"""Cache for `descriptions`: all commands share the same dataclasses, and reading a source file is
slow."""


def add_options(group: Any, config: type[Any], **defaults: Any) -> dict[str, Mapping[str, Any]]:
    """Add an option for each field of a dataclass. Return the argparse settings of the options, by
    field name.

    `defaults` replaces the defaults of fields in the help texts. A boolean option also has a
    `--no-` form, and an option for a sequence may be repeated. Two kinds of fields are omitted:
    those without a default, which are positional arguments, and those whose type cannot be written
    on a command line, such as an enum.
    """
    hints, help_texts = typing.get_type_hints(config), descriptions(config)
    added: dict[str, Mapping[str, Any]] = {}
    for field in dataclasses.fields(config):
        settings = _argparse_settings(hints[field.name])
        required = dataclasses.MISSING is field.default is field.default_factory
        if settings is None or required:
            continue
        text, default = help_texts.get(field.name, ""), defaults.get(field.name, field.default)
        if "efault" not in text and default not in (None, (), dataclasses.MISSING):
            shown = ("off", "on")[default] if isinstance(default, bool) else default
            text = f"{text} Default: {shown}."
        name = field.name.replace("_", "-")
        names = [name]
        if settings.get("action") == "append":
            text = f"{text} May be repeated."
            names = list(dict.fromkeys((name.removesuffix("s"), name)))
        if field.name in _MULTI_VALUE_FIELDS:
            settings |= {"action": "extend", "nargs": "+"}
        settings["dest"] = f"{config.__name__}.{field.name}"
        added[field.name] = settings
        group.add_argument(
            *(f"--{name}" for name in names),
            default=argparse.SUPPRESS,
            help=text.strip().replace("%", "%%"),
            **settings,
        )
    return added


def given_values(args: Any, config: type[Any]) -> dict[str, Any]:
    """Return the fields of a dataclass that were set on the command line, by field name. Lists are
    converted to tuples."""
    prefix = f"{config.__name__}."
    return {
        name.removeprefix(prefix): tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name.startswith(prefix)
    }


def _argparse_settings(hint: Any) -> dict[str, Any] | None:
    """Return the argparse settings for a field's type, or None if the type cannot be an option."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    parts = get_args(hint) if is_union else (hint,)
    for part in parts:
        if typing.get_origin(part) in (tuple, list, Sequence):
            return _list_settings(get_args(part)[0])
        if typing.get_origin(part) is Mapping:
            return {"type": parse_json_object, "metavar": "JSON"}
    kinds = [part for part in parts if part is not types.NoneType]
    literals = [
        word for p in kinds if typing.get_origin(p) is typing.Literal for word in get_args(p)
    ]
    if literals and int in kinds:
        return {
            "type": _word_or(parse_integer, literals),
            "metavar": f"{{INT,{','.join(literals)}}}",
        }
    if literals and len(kinds) == 1:  # the dataclass checks the value itself
        return {"metavar": f"{{{','.join(literals)}}}"}
    return _scalar_settings(kinds[0], types.NoneType in parts) if len(kinds) == 1 else None


def _list_settings(kind: Any) -> dict[str, Any] | None:
    if kind not in _SCALAR_TYPES:
        return None
    return {"action": "append", "type": kind, "metavar": kind.__name__.upper()}


def _scalar_settings(kind: Any, is_optional: bool) -> dict[str, Any] | None:
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind not in _SCALAR_TYPES:
        return None
    parse = parse_integer if kind is int else kind
    return {"type": _none_or(parse) if is_optional else parse, "metavar": kind.__name__.upper()}


def parse_integer(text: str) -> int:
    """Parse an integer with an optional unit: k, m and g are powers of 1000; K, M and G are powers
    of 1024. Raises `ValueError` if the result is not an integer."""
    match = _INTEGER_WITH_UNIT.fullmatch(text.strip())
    if match is None:
        return int(text)
    number, unit = match.groups()
    base = 1000 if unit.islower() else 1024
    exact = decimal.Decimal(number) * base ** ("kmg".index(unit.lower()) + 1)
    if exact % 1 or ("." in number and base == 1024):
        raise ValueError(f"{text!r} is not an integer")
    return int(exact)


parse_integer.__name__ = "int"


def _word_or(parse: Callable[[str], Any], literals: Sequence[str]) -> Callable[[str], Any]:
    """Return a function that parses a value which may also be one of `literals`, or "none" for
    None."""

    def parse_either(text: str) -> Any:
        word = text.lower()
        return None if word == "none" else word if word in literals else parse(text)

    parse_either.__name__ = f"{parse.__name__} or {' or '.join(literals)}"
    return parse_either


def parse_json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `ValueError` for any other JSON value."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def _none_or(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that parses a value which may also be "none" for None."""

    def parse_or_none(text: str) -> Any:
        return None if text.lower() == "none" else parse(text)

    parse_or_none.__name__ = parse.__name__  # argparse shows this name for an invalid value
    return parse_or_none


def descriptions(config: type[Any]) -> dict[str, str]:
    """Return the attribute docstrings of a dataclass, by field name. Empty if the source is not
    available."""
    if config not in _DESCRIPTION_CACHE:
        _DESCRIPTION_CACHE[config] = _read_descriptions(config)
    return _DESCRIPTION_CACHE[config]


def _read_descriptions(config: type[Any]) -> dict[str, str]:
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    except OSError:
        return {}
    assert isinstance(body, ast.ClassDef)
    descriptions: dict[str, str] = {}
    for field, below in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                descriptions[field.target.id] = " ".join(text.value.split())
    return descriptions
