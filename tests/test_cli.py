"""The command line, as a user calls it."""

import argparse
import ast
import dataclasses
import json
import os
import signal
import subprocess
import sys
import types
import typing
from collections.abc import Sequence

import pytest

from nanoactor import cli
from nanoactor.cli import stream
from nanoactor.cli.options import add_options, descriptions, given_values
from nanoactor.options.config import EngineConfig
from nanoactor.requests.outputs import RequestOutputKind
from nanoactor.requests.params import SamplingParams
from nanoactor.server.config import ServerConfig
from tests.product_files import matching

COMMAND = [sys.executable, "-m", "nanoactor"]
# For what is not about numbers: starts one process, without torch.
FAST = ("--device", "simulated:1", "--placement", "single")


@pytest.mark.parametrize(
    ("tokens", "seconds", "said"),
    [
        (1, 0.0, "1 token"),
        (4, 2e-5, "too few for a rate"),
        (4, 0.0, "too few for a rate"),
        (5, 2.0, "2.0 tokens/s"),
    ],
)
def test_no_rate_is_told_of_tokens_that_came_together(tokens, seconds, said):
    assert stream._rate(tokens, seconds) == said


def run(*arguments, **kwargs):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False, **kwargs
    )


def test_generate_streams_text_and_ends_with_the_line_that_matters():
    done = run("generate", "demo", "ROMEO:", "--max-tokens", "40", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ROMEO:")
    assert len(done.stdout) > 60
    for part in ("+ 40 tokens", "tokens/s", "TTFT", "KV blocks"):
        assert part in done.stderr


def test_json_lines_add_up_to_the_same_text():
    arguments = ("generate", "demo", *FAST, "--max-tokens", "30", "--seed", "1")
    lines = run(*arguments, "--json", input="ROMEO:").stdout.splitlines()
    outputs = [json.loads(line) for line in lines]
    assert sum(len(output["token_ids"]) for output in outputs) == 30
    assert outputs[-1]["finish_reason"] == "length"
    assert outputs[-1]["ttft_seconds"] < 1
    plain = run(*arguments, "ROMEO:").stdout
    assert plain.strip() == ("ROMEO:" + "".join(output["text"] for output in outputs)).strip()


def test_several_answers_are_printed_one_after_the_other():
    arguments = ("generate", "demo", *FAST, "--max-tokens", "9", "--seed", "1", "--n", "3")
    lines = run(*arguments, "--json", "--logprobs", "2", input="ROMEO:").stdout.splitlines()
    outputs = [json.loads(line) for line in lines]
    texts = ["", "", ""]
    for output in outputs:
        texts[output["index"]] += output["text"]
        assert all(len(told) >= 2 for told in output["logprobs"])
        assert len(output["logprobs"]) == len(output["token_ids"])
    assert len(set(texts)) == 3
    done = run(*arguments, "ROMEO:")
    shown = "".join(f"\n\n[{number}] {text}" for number, text in enumerate(texts, 1))
    assert done.stdout.strip() == f"ROMEO:{shown}".strip()
    assert "+ 27 tokens" in done.stderr
    assert "finished: length, length, length" in done.stderr


def test_an_answer_may_be_given_its_form():
    done = run("generate", "demo", *FAST, "--structured-outputs", '{"choice": ["yes"]}', "Well?")
    assert done.stdout.strip() == "Well?yes", done.stderr
    assert "finished: stop" in done.stderr


def test_what_the_command_line_cannot_show_is_refused():
    done = run("generate", "demo", *FAST, "--logprobs", "2", "ROMEO:")
    assert (done.returncode, done.stdout) == (1, "")
    assert "require --json" in done.stderr
    done = run("chat", "demo", *FAST, "--n", "2", input="Hi\n")
    assert done.returncode == 1
    assert "continues from one answer" in done.stderr


def test_chat_keeps_the_conversation():
    arguments = ("chat", "demo", *FAST, "--max-tokens", "30", "--seed", "2", "--json")
    done = run(*arguments, input="Who is there?\nSpeak, friend.\n")
    assert done.returncode == 0, done.stderr
    outputs = [json.loads(line) for line in done.stdout.splitlines()]
    ends = [output for output in outputs if "finish_reason" in output]
    assert len(ends) == 2
    assert ends[1]["prompt_tokens"] > ends[0]["prompt_tokens"]
    assert ends[1]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("generate", "./nowhere", "x"), "./nowhere is neither an existing directory nor a name"),
        (("generate", "demo", *FAST, ""), "the prompt is empty"),
        (("generate", "demo", *FAST, "x", "--temperature", "-1"), "temperature must be"),
        (
            ("generate", "demo", *FAST, "x", "--structured-outputs", "{}"),
            "give exactly one of json",
        ),
        (("generate", "demo", *FAST, "x", "--num-kv-blocks", "3"), "3 blocks of 16"),
        (("generate", "demo", "x", "--placement", "moon"), "placement must be one of"),
    ],
)
def test_errors_are_one_line_that_says_the_cause(arguments, text):
    done = run(*arguments)
    assert done.returncode == 1
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_leaves_ends_the_stream():
    length = ("--max-tokens", "900", "--ignore-eos")
    command = [*COMMAND, "generate", "demo", *FAST, "ROMEO:", *length]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.read(20)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == 1
    assert "Traceback" not in errors


def test_ctrl_c_ends_a_chat_that_waits_for_input():
    command = [*COMMAND, "chat", "demo", *FAST, "--max-tokens", "5", "--json"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen(command, text=True, **pipes)
    process.stdin.write("Who is there?\n")
    process.stdin.flush()
    while "finish_reason" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    assert "Traceback" not in process.stderr.read()
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()


def test_input_may_be_a_file(tmp_path):
    path = tmp_path / "said.txt"
    path.write_text("Who is there?\nSpeak!")
    with path.open() as said:
        done = run("chat", "demo", *FAST, "--max-tokens", "5", "--json", stdin=said)
    assert done.stdout.count("finish_reason") == 2, done.stderr


def test_every_option_of_serve_is_explained():
    text = run("serve", "--help").stdout
    for config in (EngineConfig, ServerConfig):
        said = descriptions(config)
        for field in dataclasses.fields(config):
            assert said[field.name].strip(), field.name
    assert "Seconds that running requests get to finish after SIGTERM" in " ".join(text.split())
    assert "nanoactor/options/config.py" not in text


WORDS = {int: ("3", 3), float: ("0.5", 0.5), str: ("x", "x")}


def words_and_value(hint):
    """What is said on a command line for a field of a plain type; None for any other."""
    if "Mapping" in str(hint):
        return ['{"image": 3}'], {"image": 3}
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
        found = [words_and_value(part) for part in parts]
        return next((given for given in reversed(found) if given), None)
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)[:1], typing.get_args(hint)[0]
    if typing.get_origin(hint) in (tuple, Sequence):
        word, value = WORDS[typing.get_args(hint)[0]]
        return (word,), (value,)
    if hint is bool:
        return (), True
    return ((WORDS[hint][0],), WORDS[hint][1]) if hint in WORDS else None


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("generate", SamplingParams),
        ("chat", SamplingParams),
        ("generate", EngineConfig),
        ("chat", EngineConfig),
        ("serve", EngineConfig),
        ("serve", ServerConfig),
    ],
)
def test_every_field_of_a_plain_type_is_an_option(command, config):
    """So that a new field of `SamplingParams` needs no edit of the command line."""
    hints = typing.get_type_hints(config)
    requests_own = {field.name for field in dataclasses.fields(SamplingParams)}
    left_out = set()
    for field in dataclasses.fields(config):
        given = words_and_value(hints[field.name])
        shadowed = command != "serve" and config is EngineConfig and field.name in requests_own
        if given is None or field.default is dataclasses.MISSING or shadowed:
            left_out.add(field.name)
            continue
        option = f"--{field.name.replace('_', '-')}"
        args = cli._parse([command, "demo", option, *given[0]])
        assert given_values(args, config)[field.name] == given[1], field.name
    # A secret has no place in a command line.
    assert left_out <= {"output_kind", "logits_processors", "model", "seed", "prefix_salt"}


def test_an_option_is_made_of_a_field_alone():
    @dataclasses.dataclass
    class Params:
        needed: int
        novelty: float | None = None
        """How new, up to 100 %."""
        marks: Sequence[int] | None = None
        loud: bool = True
        mode: typing.Literal["slow", "fast"] = "slow"
        kind: RequestOutputKind = RequestOutputKind.DELTA
        table: dict[str, int] | None = None
        nested: Sequence[int | str] | None = None
        words: list[str] = dataclasses.field(default_factory=list)

    parser = argparse.ArgumentParser()
    add_options(parser, Params, novelty=0.5)
    text = " ".join(parser.format_help().split())
    assert "--novelty FLOAT How new, up to 100 %. Default: 0.5." in text
    assert "--mode {slow,fast} Default: slow." in text
    for left_out in ("needed", "kind", "table", "nested"):
        assert left_out not in text
    assert given_values(parser.parse_args([]), Params) == {}
    said = [
        "--novelty",
        "none",
        "--mark",
        "1",
        "--marks",
        "2",
        "--no-loud",
        "--mode",
        "fast",
        "--word",
        "x",
    ]
    expected = {"novelty": None, "marks": (1, 2), "loud": False, "mode": "fast", "words": ("x",)}
    assert given_values(parser.parse_args(said), Params) == expected


def test_the_command_line_names_no_sampling_parameter():
    names = set()
    for path in matching("nanoactor/cli/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for kind, field in ((ast.Name, "id"), (ast.Attribute, "attr"), (ast.keyword, "arg")):
                names |= {getattr(node, field)} if isinstance(node, kind) else set()
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value.removeprefix("--").replace("-", "_"))
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    # Those that say what is printed.
    assert names & fields == {"output_kind", "n", "logprobs", "prompt_logprobs", "detokenize"}


def test_a_seed_is_the_requests_own():
    args = cli._parse(["generate", "demo", "--seed", "7", "hello"])
    assert args.prompt == "hello"
    assert given_values(args, SamplingParams) == {"seed": 7}
    assert given_values(args, EngineConfig) == {}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--max-model-length=5", "--max-model-len"),
        ("--max-num-batched-token", "--max-num-batched-tokens"),
    ],
)
def test_a_hint_names_what_was_all_but_certainly_meant(given, meant):
    done = run("serve", "demo", given, "1")
    assert done.returncode == 2
    assert f"did you mean {meant}?" in done.stderr


def test_text_is_utf_8_whatever_the_locale():
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    options = [*FAST, "--max-tokens", "3", "--ignore-eos"]
    arguments = [*COMMAND, "generate", "demo", *options]
    for prompt, given in ((["Größe 你好"], ""), ([], "Größe 你好")):
        done = subprocess.run(
            [*arguments, *prompt],
            input=given.encode(),
            capture_output=True,
            timeout=60,
            check=True,
            env=environment,
        )
        assert done.stdout.decode(errors="replace").startswith("Größe 你好")
        assert b"14 + 3 tokens" in done.stderr


def test_a_file_of_prompts_is_answered_in_order(tmp_path):
    """Strings, ids, chats and parameters; a line that fails does not affect others."""
    lines = [
        "ROMEO:",
        {"prompt": "JULIET:", "max_tokens": 3, "id": "second"},
        {"messages": [{"role": "user", "content": "Speak."}], "n": 2},
        {"prompt_token_ids": [5, 6, 7]},
        {"prompt": "x", "max_token": 3, "id": 5},
        {"text": "x"},
        ["ROMEO:"],
        {"prompt": ["ROMEO:"]},
        *("HAMLET:" for _ in range(20)),
    ]
    path = tmp_path / "prompts.jsonl"
    text = "\n".join(map(json.dumps, lines))
    path.write_text(text.replace("\n", "\n\n", 1) + "\nnot JSON\n")
    # The simulated device draws tokens by seed, now and then one that ends an answer.
    options = ("--max-tokens", "5", "--ignore-eos", "--max-num-seqs", "2")
    done = run("generate", "demo", *FAST, "--prompts", str(path), *options)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1, done.stderr
    assert [one["index"] for one in found] == list(range(len(lines) + 1))
    lengths = [[len(a["token_ids"]) for a in one.get("outputs", [])] for one in found]
    assert lengths == [[5], [3], [5, 5], [5], [], [], [], [], *([5] for _ in range(20)), []]
    assert {one.get("id") for one in found} == {None, "second", 5}
    errors = [one["error"]["message"] for one in found if "error" in one]
    assert {one["error"]["type"] for one in found if "error" in one} == {"InvalidRequest"}
    expected = (
        "max_tokens",
        "exactly one of",
        "a JSON string",
        "must be a string",
        "not valid JSON",
    )
    for message, part in zip(errors, expected, strict=True):
        assert part in message
    again = run("generate", "demo", *FAST, "--prompts", "-", *options, input='"ROMEO:"\n')
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)["outputs"][0]["token_ids"]) == 5


def test_a_file_of_prompts_that_does_not_exist_is_refused(tmp_path):
    done = run("generate", "demo", *FAST, "--prompts", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "--prompts" in done.stderr
    done = run("generate", "demo", *FAST, "--prompts", "-", "ROMEO:")
    assert done.returncode == 1
    assert "cannot be combined with a prompt" in done.stderr
