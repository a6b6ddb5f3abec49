"""What a directory or a file is that holds no model, and what ends an answer of one that does."""

import json
import shutil

import pytest

from nanoactor.model_files.files import read_model_files, resolve_model
from nanoactor.model_files.generation_config import parse_generation_config
from nanoactor.models.errors import ModelError
from nanoactor.options.config import EngineConfig


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "is empty"),
        (["adapter_config.json", "adapter_model.safetensors"], "LoRA"),
        (["model.Q4_K_M.gguf"], "GGUF"),
        (["model.safetensors"], "contains weights but no config.json"),
    ],
)
def test_a_directory_without_a_model_is_named_as_what_it_is(tmp_path, files, words):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=words):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "words"), [("m.gguf", "GGUF"), ("m.bin", "PyTorch"), ("m", "file")]
)
def test_a_file_is_named_as_what_it_is(tmp_path, name, words):
    (tmp_path / name).touch()
    with pytest.raises(ModelError, match=words):
        resolve_model(str(tmp_path / name))


@pytest.fixture
def model(tmp_path):
    source = resolve_model("demo")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(source / name, tmp_path)
    return tmp_path


def ends(model, config=None, generation=None, tokenizer=None):
    """The ids that end an answer where the files say so."""
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "eos_token_id": config}))
    for name, value in (("generation_config", generation), ("tokenizer_config", tokenizer)):
        if value is not None:
            (model / f"{name}.json").write_text(json.dumps(value))
    return read_model_files(EngineConfig(str(model))).eos_token_ids


def test_the_tokenizers_end_token_ends_too_and_that_is_said(model, caplog):
    """Some tools that fine-tune for chats write it there alone."""
    assert ends(model, config=0) == (0,)
    assert not caplog.records
    assert ends(model, config=0, tokenizer={"eos_token": "<|im_end|>"}) == (0, 2)
    assert "answers also end at <|im_end|> (id 2)" in caplog.text


@pytest.mark.parametrize("none", [None, -1, []])
def test_an_end_that_is_none_is_none(model, none):
    token = {"eos_token": {"content": "<|im_end|>", "special": True}}
    assert ends(model, config=none, tokenizer=token) == (2,)
    assert ends(model, config=1, generation={"eos_token_id": none}) == (1, 2)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"no_repeat_ngram_size": 3}, ("no_repeat_ngram_size",)),
        ({"no_repeat_ngram_size": None, "typical_p": 1.0, "num_beams": 1}, ()),
        ({"transformers_version": "5", "use_cache": True, "pad_token_id": 0}, ()),
        ({"suppress_tokens": [1], "stop_strings": ["a"]}, ("suppress_tokens", "stop_strings")),
        ({"nobody_has_heard_of": 2}, ("nobody_has_heard_of",)),
    ],
)
def test_what_is_not_applied_is_named(raw, named):
    assert parse_generation_config(raw).not_applied == named


@pytest.mark.parametrize(
    "raw",
    [{"do_sample": "false"}, {"do_sample": 0}, {"max_new_tokens": "9"}, {"top_k": "20"}],
)
def test_a_value_of_another_type_is_the_models_fault(raw):
    with pytest.raises(ModelError, match=next(iter(raw))):
        parse_generation_config(raw)
