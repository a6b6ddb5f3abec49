"""Which tokenizers are known to take a time and a room that grow as their text does."""

import json

import pytest
from tokenizers import Tokenizer

from nanoactor.errors import InvalidRequest
from nanoactor.text.patterns import is_bounded
from nanoactor.text.tokenizer import TextEncoder
from tests.engine.conftest import DEMO

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BACKTRACKS = "(a+)+$"


def split(regex):
    return {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }


def replace(old, new, kind="String"):
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def sequence(name, *parts):
    return {"type": "Sequence", name: list(parts)}


def normalized(*parts):
    return {"normalizer": sequence("normalizers", *parts)}


def tokenizer_directory(path, normalizer=None, pre_tokenizer=None):
    """The demo model's directory with other steps before its vocabulary."""
    path.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).write_text((DEMO / name).read_text())
    (path / "model.safetensors").write_bytes((DEMO / "model.safetensors").read_bytes())
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    if normalizer is not None:
        tokenizer["normalizer"] = normalizer
    if pre_tokenizer is not None:
        last = dict(tokenizer["pre_tokenizer"], use_regex=False)
        tokenizer["pre_tokenizer"] = sequence("pretokenizers", pre_tokenizer, last)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.mark.parametrize(
    ("steps", "bounded"),
    [
        ({}, True),
        ({"pre_tokenizer": split(GPT2)}, True),
        ({"pre_tokenizer": split(QWEN)}, True),
        ({"pre_tokenizer": split(QWEN + " ")}, False),
        ({"pre_tokenizer": split(BACKTRACKS)}, False),
        ({"pre_tokenizer": split(r"\s+")}, True),
        ({"pre_tokenizer": split(r"\p{N}{1,3}")}, True),
        ({"pre_tokenizer": split(r"\s+\s+")}, False),
        ({"pre_tokenizer": split(r"a.b")}, True),
        ({"pre_tokenizer": {"type": "Metaspace"}}, True),
        ({"pre_tokenizer": {"type": "OfTomorrow"}}, False),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"String": "(a+)+"}}}, True),
        ({"pre_tokenizer": sequence("pretokenizers", split(GPT2), split(BACKTRACKS))}, False),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"normalizer": {"type": "OfTomorrow"}}, False),
        (normalized({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")), True),
        (normalized(replace("a", "a" * 60)), True),
        (normalized(replace("a", "a" * 60), replace("a", "a" * 60)), False),
        (normalized(replace(" {2,}", " ", "Regex")), True),
        (normalized(replace("(a+)+$", " ", "Regex")), False),
        (normalized(replace("", "x")), False),
    ],
)
def test_what_is_known_to_be_bounded(steps, bounded):
    assert is_bounded(steps) is bounded


def test_a_panic_of_the_library_is_the_texts_error(tmp_path):
    encoder = TextEncoder(tokenizer_directory(tmp_path / "m", pre_tokenizer=split(BACKTRACKS)))
    assert not encoder.is_bounded
    with pytest.raises(
        InvalidRequest, match="cannot be tokenized because the tokenizer failed.*limit"
    ):
        encoder.encode_text("a" * 40 + "!")
    assert len(encoder.encode_text("go on"))


@pytest.mark.long
def test_qwens_expression_has_a_limit_and_no_panic(tmp_path):
    """10,000,000 retries: a run of spaces that is longer than any prompt of 300,000 tokens."""
    encoder = TextEncoder(tokenizer_directory(tmp_path / "m", pre_tokenizer=split(QWEN)))
    assert encoder.is_bounded
    with pytest.raises(InvalidRequest, match="limit"):
        encoder.encode_text(" " * 10_100_000 + "a")


def test_the_steps_are_read_as_the_file_has_them(tmp_path):
    steps = {"normalizer": {"type": "NFC"}, "pre_tokenizer": split(QWEN)}
    path = tokenizer_directory(tmp_path / "m", **steps)
    assert TextEncoder(path).is_bounded
    assert Tokenizer.from_file(str(path / "tokenizer.json")).encode("a b").ids
