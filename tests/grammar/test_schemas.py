"""Answers under a schema are valid, whatever a model writes."""

import json
import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.grammar.schemas import object_schema, schemas
from tests.grammar.vocabularies import byte_level, compiled, demo, sample

SCHEMAS = schemas()
USUAL = SCHEMAS[::8]
FORMATS = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
# Those that the library leaves to packages that are not installed.
HOUR = r"([01]\d|2[0-3]):[0-5]\d"
TIME = rf"{HOUR}:([0-5]\d|60)(\.\d+)?(Z|[+-]{HOUR})"
LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
PERIOD = r"(\d+[YMWD])*(T(\d+[HMS])+)?"
for name, pattern in {
    "time": TIME,
    "date-time": rf"\d{{4}}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])T{TIME}",
    "hostname": rf"{LABEL}(\.{LABEL})*",
    "duration": rf"P(?!$){PERIOD}",
}.items():
    FORMATS.checks(name)(
        lambda value, form=re.compile(pattern, re.IGNORECASE): (
            not isinstance(value, str) or form.fullmatch(value) is not None
        )
    )


def validate(schema, text):
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator(schema, format_checker=FORMATS).validate(json.loads(text))


def finished(vocabulary, pairs):
    """How many of the schemas get an answer; each answer is valid."""
    count = 0
    for name, schema in pairs:
        for whitespace in (False, True):
            grammar = compiled(vocabulary, "json_schema", schema, whitespace=whitespace)
            text = sample(vocabulary, grammar, name)
            if text is not None:
                validate(schema, text)
                count += 1
    return count / len(pairs) / 2


def test_there_are_schemas_of_every_kind():
    assert len(SCHEMAS) == len(dict(SCHEMAS)) >= 300
    assert len(USUAL) >= 40
    assert schemas() == SCHEMAS
    for _, schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("vocabulary", [byte_level, demo])
def test_random_answers_are_valid(vocabulary):
    assert finished(vocabulary(), USUAL) >= 0.8


@pytest.mark.long
@pytest.mark.parametrize("vocabulary", [byte_level, demo])
def test_random_answers_to_all_schemas_are_valid(vocabulary):
    assert finished(vocabulary(), SCHEMAS) >= 0.8


@given(chance=st.randoms(use_true_random=True), depth=st.integers(1, 3), seed=st.integers())
def test_random_answers_to_random_schemas_are_valid(chance, depth, seed):
    schema = object_schema(chance, depth)
    text = sample(byte_level(), compiled(byte_level(), "json_schema", schema), seed)
    if text is not None:
        validate(schema, text)


def test_the_validator_refuses_what_it_should():
    """Else the tests above would show nothing."""
    for form, text in {
        "time": "22:07:33",
        "date-time": "2020-13-01T00:00:00Z",
        "hostname": "-a",
        "duration": "P",
        "date": "2020-02-30",
        "uuid": "x",
        "ipv4": "1.2.3",
        "email": "x",
    }.items():
        with pytest.raises(jsonschema.ValidationError):
            validate({"type": "string", "format": form}, json.dumps(text))
