"""Schemas as users send them: by hand for what they are about, and at random from seeds."""

import random
from typing import Any

Schema = dict[str, Any]

WORDS = ("id", "name", "kind", "count", "price", "owner", "zone", "limit", "query", "order", "rank")
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "duration", "hostname")
PATTERNS = (
    "^[a-z]{2,8}$",
    "^[A-Z]{3}-[0-9]{4}$",
    "^(red|green|blue)$",
    "^#[0-9a-f]{6}$",
    "^v[0-9]+\\.[0-9]+\\.[0-9]+$",
    "^\\d{5}(-\\d{4})?$",
    "^[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?$",
    "^/([a-z]+/){0,3}$",
)


def obj(properties: Schema, required: Any = "all", **more: Any) -> Schema:
    """An object's schema, closed unless `additionalProperties` says otherwise."""
    names = list(properties) if required == "all" else list(required)
    schema: Schema = {"type": "object", "properties": properties, "required": names}
    return {**schema, "additionalProperties": False, **more}


def array(items: Schema, low: int = 0, high: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def text(high: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": high, **more}


INTEGER: Schema = {"type": "integer", "minimum": 0, "maximum": 1000}
BOOLEAN: Schema = {"type": "boolean"}


def schemas() -> list[tuple[str, Schema]]:
    """At least 300 pairs of a name and a schema, the same each time."""
    made = [*_trivial(), *_strings(), *_numbers(), *_objects(), *_references(), *_combined()]
    made += [*_calls(), *_configurations(), *_cluster()]
    for kind, depth, count in (("easy", 1, 60), ("medium", 2, 80), ("hard", 3, 60)):
        for seed in range(count):
            chance = random.Random(f"{kind} {seed}")
            made.append((f"{kind}-{seed}", object_schema(chance, depth)))
    return made


def _trivial() -> list[tuple[str, Schema]]:
    return [
        ("null", {"type": "null"}),
        ("boolean", {"type": "boolean"}),
        ("integer", {"type": "integer"}),
        ("number", {"type": "number"}),
        ("short-text", {"type": "string", "maxLength": 5}),
        ("text", {"type": "string"}),
        ("const-text", {"const": "fixed"}),
        ("const-number", {"const": 42}),
        ("const-object", {"const": {"a": [1, None, True], "b": "x"}}),
        ("enum-text", {"enum": ["a", "b", "c"]}),
        ("enum-mixed", {"enum": [1, "one", None, True, [1], {"k": 2}]}),
        ("enum-quoted", {"enum": ['"', "\\", "a\nb", "é", "\U0001f600", ""]}),
        ("types", {"type": ["integer", "null"]}),
        ("types-bounded", {"type": ["string", "integer"], "maxLength": 4, "minimum": 3}),
        ("empty-object", obj({})),
        ("empty-array", {"type": "array", "maxItems": 0}),
        ("annotated", {"title": "T", "description": "D", "default": 1, "type": "integer"}),
        ("draft-07", {"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer"}),
        ("id", {"$id": "https://example.com/s", "type": "boolean"}),
        ("many-texts", {"enum": [f"value-{i}" for i in range(300)]}),
    ]


def _strings() -> list[tuple[str, Schema]]:
    made = [(f"format-{name}", {"type": "string", "format": name}) for name in FORMATS]
    made += [(f"pattern-{i}", {"type": "string", "pattern": one}) for i, one in enumerate(PATTERNS)]
    return [
        *made,
        ("length", text(4, minLength=2)),
        ("length-exact", text(3, minLength=3)),
        ("pattern-unanchored", text(9, pattern="ab+")),
        ("pattern-and-length", text(6, minLength=4, pattern="^[xyz]*$")),
        ("pattern-class", {"type": "string", "pattern": "^\\w{1,5}\\s\\d{2}$"}),
        ("pattern-quote", {"type": "string", "pattern": '^"[a-c]\\\\?"$'}),
        ("pattern-unicode", {"type": "string", "pattern": "^[àéü]{2,4}$"}),
    ]


def _numbers() -> list[tuple[str, Schema]]:
    return [
        ("range", {"type": "integer", "minimum": 5, "maximum": 17}),
        ("range-negative", {"type": "integer", "minimum": -250, "maximum": -3}),
        ("range-across", {"type": "integer", "minimum": -5, "maximum": 1234}),
        ("exclusive", {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}),
        ("minimum", {"type": "integer", "minimum": 100}),
        ("maximum", {"type": "integer", "maximum": -100}),
        ("fraction", {"type": "number", "minimum": 0, "maximum": 1}),
        ("fraction-open", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2.5}),
        ("latitude", {"type": "number", "minimum": -90, "maximum": 90}),
        ("multiple", {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}),
        ("port", {"type": "integer", "minimum": 1, "maximum": 65535}),
        ("one-value", {"type": "integer", "minimum": 7, "maximum": 7}),
    ]


def _objects() -> list[tuple[str, Schema]]:
    small = {"a": INTEGER, "b": BOOLEAN, "c": text(4)}
    return [
        ("all-required", obj(small)),
        ("none-required", obj(small, [])),
        ("last-required", obj(small, ["c"])),
        ("first-required", obj(small, ["a"])),
        ("undeclared-required", {"type": "object", "required": ["x"]}),
        ("open", obj(small, additionalProperties=True)),
        ("map-of-integers", {"type": "object", "additionalProperties": INTEGER}),
        ("map-and-property", obj({"a": INTEGER}, additionalProperties=text(3))),
        ("by-pattern", obj({}, patternProperties={"^x-[a-z]{1,5}$": INTEGER})),
        (
            "by-patterns",
            obj({"id": INTEGER}, patternProperties={"^n[0-9]$": INTEGER, "^s[0-9]$": text(3)}),
        ),
        ("at-most-one", obj(small, [], maxProperties=1)),
        ("at-least-one", obj(small, [], minProperties=1)),
        ("quoted-names", obj({'a"b': INTEGER, "c\\d": BOOLEAN, "é\n": {"type": "null"}})),
        ("many-properties", obj({f"property{i}": BOOLEAN for i in range(60)})),
        ("many-optional", obj({f"property{i}": BOOLEAN for i in range(60)}, [])),
        ("array-of-objects", array(obj(small), 1, 4)),
        ("array-of-arrays", array(array(INTEGER, 2, 2), 1, 3)),
        ("tuple", {"type": "array", "prefixItems": [INTEGER, text(3)], "items": False}),
        ("tuple-more", {"type": "array", "prefixItems": [INTEGER], "items": BOOLEAN}),
        ("array-exact", array(BOOLEAN, 4, 4)),
        ("array-unbounded", {"type": "array", "items": BOOLEAN}),
        ("nested-nine", _nested(9)),
        ("nested-thirty", _nested(30)),
    ]


def _nested(depth: int) -> Schema:
    schema: Schema = INTEGER
    for level in range(depth):
        schema = obj({f"level{level}": schema})
    return schema


def _references() -> list[tuple[str, Schema]]:
    node = obj({"value": INTEGER, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}})
    tree = obj({"leaf": BOOLEAN, "children": array({"$ref": "#/$defs/tree"}, 0, 2)})
    even = obj({"odd": {"anyOf": [{"$ref": "#/$defs/odd"}, {"type": "null"}]}})
    odd = obj({"even": {"anyOf": [{"$ref": "#/$defs/even"}, {"type": "null"}]}})
    point = obj({"x": INTEGER, "y": INTEGER})
    expression = {
        "anyOf": [
            INTEGER,
            obj({"op": {"enum": ["+", "-"]}, "args": array({"$ref": "#/$defs/e"}, 0, 2)}),
        ]
    }
    return [
        ("ref", {**obj({"p": {"$ref": "#/$defs/point"}}), "$defs": {"point": point}}),
        ("definitions", {"$ref": "#/definitions/point", "definitions": {"point": point}}),
        ("ref-twice", {**array({"$ref": "#/$defs/p"}, 1, 2), "$defs": {"p": point}}),
        ("ref-to-property", obj({"a": text(3), "b": {"$ref": "#/properties/a"}})),
        ("ref-escaped", {"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER}}),
        ("ref-chain", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": point}}),
        ("list", node),
        ("tree", {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}),
        ("mutual", {"$ref": "#/$defs/even", "$defs": {"even": even, "odd": odd}}),
        ("expression", {"$ref": "#/$defs/e", "$defs": {"e": expression}}),
        ("arrays-within", {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}),
    ]


def _combined() -> list[tuple[str, Schema]]:
    circle = obj({"kind": {"const": "circle"}, "radius": INTEGER})
    square = obj({"kind": {"const": "square"}, "side": INTEGER})
    return [
        ("any-of", {"anyOf": [INTEGER, text(4)]}),
        ("any-of-overlap", {"anyOf": [INTEGER, {"type": "integer", "minimum": 990}]}),
        ("any-of-objects", {"anyOf": [circle, square]}),
        ("one-of-types", {"oneOf": [INTEGER, text(4), {"type": "null"}]}),
        ("one-of-kind", {"oneOf": [circle, square]}),
        ("all-of", {"allOf": [{"minimum": 3}, {"type": "integer", "maximum": 12}]}),
        (
            "all-of-objects",
            {
                "allOf": [
                    {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
                    {"type": "object", "properties": {"b": BOOLEAN}, "required": ["b"]},
                ],
                "unknownKeyword": 1,
            },
        ),
        ("all-of-texts", {"allOf": [text(5), {"type": "string", "pattern": "^a"}]}),
        ("nullable", {"anyOf": [circle, {"type": "null"}]}),
        ("any-of-beside", {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": -5}]}),
        ("ref-beside", {"$ref": "#/$defs/i", "maximum": 9, "$defs": {"i": INTEGER}}),
        ("array-of-any", array({"anyOf": [circle, square, BOOLEAN]}, 1, 3)),
    ]


def _calls() -> list[tuple[str, Schema]]:
    """Arguments of functions."""
    unit = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    place = obj({"latitude": {"type": "number", "minimum": -90, "maximum": 90}, "name": text(20)})
    column = {"enum": ["day", "week", "month"]}
    return [
        ("call-weather", obj({"city": text(20), "unit": unit}, ["city"])),
        ("call-place", obj({"place": place, "days": INTEGER}, ["place"])),
        ("call-search", obj({"query": text(30), "filters": array(text(8)), "limit": INTEGER})),
        (
            "call-mail",
            obj(
                {
                    "to": array({"type": "string", "format": "email"}, 1, 2),
                    "subject": text(20),
                    "at": {"type": "string", "format": "date-time"},
                }
            ),
        ),
        ("call-query", obj({"table": text(8), "columns": array(column, 1, 3), "where": text(20)})),
        ("call-none", obj({})),
        ("call-transfer", obj({"from": text(8), "to": text(8), "cents": INTEGER, "note": text()})),
        (
            "call-book",
            obj(
                {
                    "date": {"type": "string", "format": "date"},
                    "time": {"type": "string", "format": "time"},
                    "seats": array({"type": "string", "pattern": "^[1-9][0-9]?[A-F]$"}, 1, 4),
                    "class": {"enum": ["economy", "business", None]},
                },
                ["date", "seats"],
            ),
        ),
    ]


def _configurations() -> list[tuple[str, Schema]]:
    step = obj({"run": text(20), "env": {"type": "object", "additionalProperties": text(6)}})
    port = {"type": "integer", "minimum": 1, "maximum": 65535}
    logging = obj({"level": {"enum": ["debug", "info", "error"]}, "file": text(16)}, ["level"])
    return [
        ("config-server", obj({"host": text(), "port": port, "logging": logging}, ["port"])),
        ("config-ci", obj({"name": text(), "steps": array(step, 1, 3)})),
        (
            "config-lint",
            obj(
                {
                    "extends": {"anyOf": [text(), array(text())]},
                    "rules": obj(
                        {}, patternProperties={"^[a-z]{2,6}-[a-z]{2,6}$": {"enum": [0, 1, 2]}}
                    ),
                },
                [],
            ),
        ),
        ("config-editor", obj({"tabSize": {"enum": [2, 4, 8]}, "trim": BOOLEAN}, [])),
        (
            "config-package",
            obj(
                {
                    "name": {"type": "string", "pattern": "^[a-z][a-z-]{1,12}$"},
                    "version": {"type": "string", "pattern": PATTERNS[4]},
                    "dependencies": {"type": "object", "additionalProperties": text(8)},
                    "private": BOOLEAN,
                },
                ["name", "version"],
            ),
        ),
        ("config-network", obj({"servers": array({"type": "string", "format": "ipv4"}, 1, 3)})),
    ]


def _cluster() -> list[tuple[str, Schema]]:
    """Nested objects that share definitions, as a cluster's resources do."""
    name = {"type": "string", "pattern": PATTERNS[6]}
    defs = {
        "meta": obj(
            {"name": name, "labels": {"type": "object", "additionalProperties": text(6)}}, ["name"]
        ),
        "quantity": {"anyOf": [INTEGER, {"type": "string", "pattern": "^[0-9]{1,4}(m|Ki|Mi)$"}]},
        "resources": obj(
            {"cpu": {"$ref": "#/$defs/quantity"}, "mem": {"$ref": "#/$defs/quantity"}}
        ),
        "container": obj(
            {
                "name": name,
                "image": text(16),
                "ports": array({"type": "integer", "minimum": 1, "maximum": 65535}, 0, 2),
                "resources": {"$ref": "#/$defs/resources"},
                "env": array(obj({"name": text(6), "value": text(6)}), 0, 2),
            },
            ["name", "image"],
        ),
        "pod": obj(
            {
                "containers": array({"$ref": "#/$defs/container"}, 1, 2),
                "restartPolicy": {"enum": ["Always", "OnFailure", "Never"]},
            },
            ["containers"],
        ),
    }
    pod = {"$ref": "#/$defs/pod"}
    kinds = {
        "Pod": pod,
        "Deployment": obj({"replicas": INTEGER, "template": pod}),
        "Job": obj(
            {"completions": INTEGER, "backoffLimit": INTEGER, "template": pod}, ["template"]
        ),
        "ConfigMap": {"type": "object", "additionalProperties": text(10)},
    }
    return [
        (
            f"cluster-{kind.lower()}",
            obj(
                {
                    "apiVersion": {"const": "v1"},
                    "kind": {"const": kind},
                    "metadata": {"$ref": "#/$defs/meta"},
                    "spec": body,
                },
                **{"$defs": defs},
            ),
        )
        for kind, body in kinds.items()
    ]


def object_schema(chance: random.Random, depth: int) -> Schema:
    """An object of up to `depth` levels."""
    names = chance.sample(WORDS, chance.randint(1, 3 + depth))
    properties = {name: _value(chance, depth - 1) for name in names}
    required = [name for name in names if chance.random() < 0.6]
    more: Schema = {}
    if chance.random() < 0.15:
        more["additionalProperties"] = _leaf(chance)
    if chance.random() < 0.15:
        more["description"] = "Made from a seed."
    return obj(properties, required, **more)


def _value(chance: random.Random, depth: int) -> Schema:
    kind = chance.random()
    if depth <= 0 or kind < 0.4:
        return _leaf(chance)
    if kind < 0.65:
        return object_schema(chance, depth)
    if kind < 0.85:
        low = chance.randint(0, 2)
        return array(_value(chance, depth - 1), low, low + chance.randint(0, 2))
    return {
        "anyOf": [_value(chance, depth - 1), object_schema(chance, depth - 1), {"type": "null"}]
    }


def _leaf(chance: random.Random) -> Schema:
    low = chance.randint(-1000, 1000)
    leaves: list[Schema] = [
        BOOLEAN,
        {"type": "null"},
        {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 5000)},
        {"type": "number", "minimum": low, "maximum": low + 1},
        text(chance.randint(0, 10)),
        {"type": "string", "format": chance.choice(FORMATS)},
        {"type": "string", "pattern": chance.choice(PATTERNS)},
        {"enum": chance.sample(WORDS, chance.randint(1, 6))},
        {"const": chance.choice([0, -1, "x", None, True, 2.5, chance.choice(WORDS)])},
        {"type": ["boolean", "null"]},
    ]
    return chance.choice(leaves)
