"""Models without tokenizer.json: converted once, in a process of its own, as transformers reads
them."""

import importlib.metadata
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nanoactor.models.errors import ModelError
from nanoactor.text import huggingface
from nanoactor.text.huggingface import find_tokenizer, load_pretrained
from nanoactor.text.template import ChatTemplate
from nanoactor.text.tokenizer import TextEncoder
from tests.text.tokenizers_for_tests import DEMO, PLAIN_ADDED, TEXTS, without_tokenizer_json

CHAT = [{"role": "user", "content": "Größe 和 'tis <b>&amp;</b>\n"}]
NAMED = [
    {"name": "default", "template": "{{ bos_token }}|{{ messages[0].content }}|{{ eos_token }}"},
    {"name": "tool_use", "template": "{{ pad_token }}{{ tools }}{{ messages[0].content }}"},
]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanoactor" / "tokenizers"


@pytest.fixture
def conversions(monkeypatch):
    """The processes that convert, as they are started."""
    started, run = [], subprocess.run

    def counted(command, **options):
        started.append(command)
        return run(command, **options)

    monkeypatch.setattr(huggingface.subprocess, "run", counted)
    return started


def forged(monkeypatch):
    """A conversion that takes no time."""

    def run(directory, target, timeout):
        for name in ("tokenizer_config.json", "tokenizer.json"):
            Path(target, name).write_text("{}")

    monkeypatch.setattr(huggingface, "_run_conversion", run)


def test_a_model_with_tokenizer_json_is_served_from_its_own_directory(cache, conversions):
    assert find_tokenizer(DEMO, 60) == DEMO
    assert not conversions
    assert not cache.exists()


def test_what_is_converted_reads_as_transformers_does(tmp_path, cache, conversions, caplog):
    added = json.loads((DEMO / "tokenizer.json").read_text())["added_tokens"]
    decoder = {str(token.pop("id")): token for token in added}
    decoder["2048"] = {**added[0], "content": PLAIN_ADDED, "special": False}
    path = without_tokenizer_json(
        tmp_path / "m",
        added_tokens_decoder=decoder,
        chat_template=NAMED,
        bos_token="<|im_start|>",
        pad_token={**added[0], "__type": "AddedToken"},
    )
    made = find_tokenizer(path, 60)
    assert made.parent == cache
    assert f"{path} has no tokenizer.json; converting its tokenizer once" in caplog.text
    theirs, ours = AutoTokenizer.from_pretrained(path), TextEncoder(made)
    for text in (*TEXTS, f"<|im_start|>user\n{PLAIN_ADDED}!", "<|endoftext|>x", " "):
        ids = ours.encode_text(text).tolist()
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.encode_text(PLAIN_ADDED).tolist() == [2048]
    for options in ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        text = ChatTemplate(made).render(CHAT, options)
        assert text == theirs.apply_chat_template(CHAT, tokenize=False, **options)
    assert ChatTemplate(made).render(CHAT, {}) == f"<|im_start|>|{CHAT[0]['content']}|<|im_end|>"
    caplog.clear()
    assert find_tokenizer(path, 60) == made
    assert len(conversions) == 1, "the second time it is found"
    assert not caplog.records
    assert {file.name for file in made.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_a_template_in_a_file_of_its_own_is_kept_with_the_tokens_that_only_a_class_knows(
    tmp_path, cache
):
    path = without_tokenizer_json(tmp_path / "m", chat_template="another")
    (path / "tokenizer_config.json").unlink()
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    text = ChatTemplate(find_tokenizer(path, 60)).render(CHAT, {})
    assert text == AutoTokenizer.from_pretrained(path).apply_chat_template(CHAT, tokenize=False)
    assert text == CHAT[0]["content"] + "<|endoftext|>"  # Qwen2Tokenizer's own


def test_what_a_conversion_depends_on_makes_another_one(tmp_path, cache, monkeypatch):
    forged(monkeypatch)
    path = without_tokenizer_json(tmp_path / "m")
    seen = {find_tokenizer(path, 60)}
    assert find_tokenizer(without_tokenizer_json(tmp_path / "same"), 60) in seen
    for name in ("vocab.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"):
        with (path / name).open("a") as file:
            file.write("\n")
        made = find_tokenizer(path, 60)
        assert made not in seen, name
        seen.add(made)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.99")
    assert find_tokenizer(path, 60) not in seen


def test_engines_that_convert_at_the_same_time_do_not_disturb_each_other(
    tmp_path, cache, conversions
):
    path, found = without_tokenizer_json(tmp_path / "m"), []
    threads = [
        threading.Thread(target=lambda: found.append(find_tokenizer(path, 60))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 2
    assert len(found) == 2
    (made,) = set(found)
    assert {file.name for file in made.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert len(TextEncoder(made).encode_text("To be")) == len(
        TextEncoder(DEMO).encode_text("To be")
    )


def test_what_was_left_half_done_is_done_again(tmp_path, cache, monkeypatch):
    forged(monkeypatch)
    path = without_tokenizer_json(tmp_path / "m")
    made = find_tokenizer(path, 60)
    (made / "tokenizer.json").unlink()
    assert find_tokenizer(path, 60) == made
    assert (made / "tokenizer.json").exists()


@pytest.mark.parametrize("home", ["file", "nobody"])
def test_without_a_cache_it_is_kept_for_the_process(tmp_path, home):
    path = without_tokenizer_json(tmp_path / "m")
    (tmp_path / "file").write_text("no directory")
    program = f"""
import os, pathlib
from nanoactor.text import huggingface
os.environ["XDG_CACHE_HOME"] = {str(tmp_path / "file") if home == "file" else ""!r}
def nobody():
    raise RuntimeError("Could not determine home directory.")
pathlib.Path.home = nobody
def run(directory, target, timeout):
    for name in ("tokenizer_config.json", "tokenizer.json"):
        pathlib.Path(target, name).write_text("x")
huggingface._run_conversion = run
made = huggingface.find_tokenizer(pathlib.Path({str(path)!r}), 60)
assert sorted(file.name for file in made.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
print(made)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert "converted tokenizers cannot be cached" in done.stderr
    assert not Path(done.stdout.strip()).exists()


@pytest.mark.parametrize("kept", [(), ("vocab.json",), ("merges.txt",)])
def test_a_model_without_any_tokenizer_names_what_was_looked_for(tmp_path, cache, kept):
    path = without_tokenizer_json(tmp_path / "m")
    for name in {"vocab.json", "merges.txt"} - set(kept):
        (path / name).unlink()
    words = (
        "no tokenizer.json and no files .*tokenizer.model or vocab.json with merges.txt.*skip_tok"
    )
    with pytest.raises(ModelError, match=words):
        find_tokenizer(path, 60)


def test_a_conversion_that_fails_says_why(tmp_path, cache):
    path = without_tokenizer_json(tmp_path / "m")
    (path / "merges.txt").write_text("a b c d\n")
    with pytest.raises(
        ModelError, match=f"{path} cannot be .*: .*Merges text file invalid at"
    ) as caught:
        find_tokenizer(path, 60)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError), "all that the process has said"
    with pytest.raises(ModelError, match="within the start_timeout of 0.01 s"):
        find_tokenizer(path, 0.01)
    assert not list(cache.rglob("*.json"))


def test_a_sentencepiece_model_that_cannot_be_read_names_the_packages_that_it_takes(
    tmp_path, cache
):
    path = tmp_path / "m"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (path / "tokenizer.model").write_bytes(b"\xff\xff not a model")
    with pytest.raises(
        ModelError, match="packages sentencepiece and protobuf. Add a tokenizer.json"
    ):
        find_tokenizer(path, 60)


def test_a_class_that_reads_other_files_makes_no_empty_tokenizer(tmp_path, cache):
    path = without_tokenizer_json(tmp_path / "m", tokenizer_class="LlamaTokenizer")
    with pytest.raises(ModelError, match="LlamaTokenizer found no vocabulary"):
        find_tokenizer(path, 60)


def test_a_model_is_not_asked_for_code(tmp_path, cache):
    path = without_tokenizer_json(
        tmp_path / "m",
        tokenizer_class="Strange",
        auto_map={"AutoTokenizer": ["strange.Strange", None]},
    )
    (path / "strange.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    with pytest.raises(ModelError, match="cannot be converted"):
        find_tokenizer(path, 60)
    assert not (tmp_path / "mark").exists()


def test_a_tokenizer_that_transformers_cannot_load_is_the_models_fault(tmp_path):
    path = without_tokenizer_json(tmp_path / "m")
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=f"transformers cannot load the tokenizer of {path}"):
        load_pretrained(path)


def test_a_search_for_protobuf_does_not_hide_what_is_wrong(tmp_path, monkeypatch):
    """As versions 4 and 5.0 of transformers look for it whenever they handle an error."""
    missing = ImportError("requires the protobuf library")

    def look(*given, **named):
        raise missing

    def handle(*given, **named):
        try:
            raise ValueError("the merges are invalid")
        except ValueError:
            look()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", handle)
    with pytest.raises(ModelError, match="of .*: the merges are invalid$") as caught:
        load_pretrained(tmp_path)
    assert isinstance(caught.value.__cause__, ValueError)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", look)
    try:
        raise KeyError("the caller's own")
    except KeyError:
        with pytest.raises(ModelError, match="requires the protobuf library"):
            load_pretrained(tmp_path)
