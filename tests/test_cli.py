"""The command line, as a user calls it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest

from nanoactor.cli.serve import descriptions
from nanoactor.config import EngineConfig
from nanoactor.server.config import ServerConfig

COMMAND = [sys.executable, "-m", "nanoactor"]


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
    arguments = ("generate", "demo", "--max-tokens", "30", "--seed", "1")
    lines = run(*arguments, "--json", input="ROMEO:").stdout.splitlines()
    outputs = [json.loads(line) for line in lines]
    assert sum(len(output["token_ids"]) for output in outputs) == 30
    assert outputs[-1]["finish_reason"] == "length"
    assert outputs[-1]["ttft_seconds"] < 1
    plain = run(*arguments, "ROMEO:").stdout
    assert plain.strip() == ("ROMEO:" + "".join(output["text"] for output in outputs)).strip()


def test_chat_keeps_the_conversation():
    arguments = ("chat", "demo", "--max-tokens", "30", "--seed", "2", "--json")
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
        (("generate", "./nowhere", "x"), "./nowhere is neither a directory nor a name"),
        (("generate", "demo", ""), "the prompt is empty"),
        (("generate", "demo", "x", "--temperature", "-1"), "temperature must be"),
        (("generate", "demo", "x", "--num-kv-blocks", "3"), "3 blocks of 16"),
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
    command = [*COMMAND, "generate", "demo", "ROMEO:", "--max-tokens", "900", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.read(20)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == 1
    assert "Traceback" not in errors


def test_ctrl_c_ends_a_chat_that_waits_for_input():
    command = [*COMMAND, "chat", "demo", "--max-tokens", "5", "--json"]
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
        done = run("chat", "demo", "--max-tokens", "5", "--json", stdin=said)
    assert done.stdout.count("finish_reason") == 2, done.stderr


def test_every_option_of_serve_is_explained():
    text = run("serve", "--help").stdout
    for config in (EngineConfig, ServerConfig):
        said = descriptions(config)
        for field in dataclasses.fields(config):
            assert said[field.name].strip(), field.name
    assert "Seconds that running requests are given after SIGTERM" in " ".join(text.split())
    assert "nanoactor/config.py" not in text


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--gpu-memory-utilization", "--memory-utilization"),
        ("--max-model-length=5", "--max-model-len"),
        ("--tp", "--tensor-parallel-size"),
    ],
)
def test_other_names_of_options_lead_to_ours(given, meant):
    done = run("serve", "demo", given, "1")
    assert done.returncode == 2
    assert f"do you mean {meant}?" in done.stderr


def test_text_is_utf_8_whatever_the_locale():
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = [*COMMAND, "generate", "demo", "--device", "simulated:1", "--max-tokens", "3"]
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
