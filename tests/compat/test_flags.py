"""Lines for `vllm serve` and SGLang on our command line: each flag is taken or refused with a
reason."""

import re
from pathlib import Path

import pytest

from nanoactor import cli
from nanoactor.cli.options import given_values
from nanoactor.compat.flags import NOTES
from nanoactor.errors import InvalidConfig
from nanoactor.options.config import EngineConfig
from nanoactor.requests.known_names import ENGINE, SERVER
from nanoactor.requests.params import SamplingParams
from nanoactor.server.config import ServerConfig

SERVER_PAGE = Path(__file__).parents[2] / "docs" / "server.md"

# Flags that people paste, by what becomes of them.
TAKEN = """
--host 0.0.0.0
--port 8001
--uds /tmp/x.sock
--api-key k
--served-model-name a b
--tokenizer /m
--revision main
--download-dir /d
--load-format auto
--dtype bfloat16
--max-model-len 8192
--max-model-len 8k
--max-model-len auto
--max-num-seqs 64
--max-num-batched-tokens 8192
--gpu-memory-utilization 0.9
--mem-fraction-static 0.9
--tensor-parallel-size 2
-tp 2
--enforce-eager
--enable-prefix-caching
--no-enable-prefix-caching
--disable-radix-cache
--block-size 16
--seed 0
--limit-mm-per-prompt {"image":2}
--allowed-media-domains example.org
--chat-template /x.jinja
--default-chat-template-kwargs {"enable_thinking":false}
--generation-config vllm
--override-generation-config {}
--tool-call-parser hermes
--reasoning-parser qwen3
--max-logprobs 20
--root-path /llm
--ssl-keyfile /k
--ssl-certfile /c
--allowed-origins ["*"]
--uvicorn-log-level warning
--disable-uvicorn-access-log
--disable-access-log-for-endpoints /health,/metrics
--log-level warning
--device cuda
--context-length 8192
--tp-size 2
--chunked-prefill-size 4096
--enable-tokenizer-info-endpoint
--otlp-traces-endpoint http://localhost:4318/v1/traces
--max_num_seqs 64
""".strip().splitlines()
MOOT = """
--tokenizer-mode auto
--trust-remote-code
--pipeline-parallel-size 1
--data-parallel-size 1
--distributed-executor-backend mp
--enable-chunked-prefill
--swap-space 4
--cpu-offload-gb 0
--compilation-config {}
-O3
--speculative-config {}
--max-lora-rank 16
--mm-processor-kwargs {}
--chat-template-content-format openai
--hf-overrides {}
--enable-auto-tool-choice
--structured-outputs-config {}
--disable-log-requests
--disable-log-stats
--enable-request-id-headers
--enable-prompt-tokens-details
--enable-server-load-tracking
--async-scheduling
--scheduling-policy priority
--kv-transfer-config {}
""".strip().splitlines()
REFUSED = """
--kv-cache-dtype fp8
--kv-cache-memory-bytes 1000
--quantization awq
--enable-expert-parallel
--attention-backend FLASH_ATTN
--enable-lora
--lora-modules a=/x
--allowed-local-media-path /x
--tool-parser-plugin /x
--logits-processors x
--runner pooling
--task embed
--allow-credentials
--enable-log-requests
--enable-force-include-usage
--return-tokens-as-token-ids
--collect-detailed-traces all
--api-server-count 2
--enable-sleep-mode
--no-enable-chunked-prefill
--swap
""".strip().splitlines()


def parsed(*arguments, command="serve"):
    return cli._parse([command, "MODEL", *arguments])


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        parsed(*arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("line", TAKEN)
def test_a_flag_that_has_a_counterpart_is_taken(line):
    args = parsed(*line.split())
    assert getattr(args, NOTES) == []
    found = given_values(args, EngineConfig) | given_values(args, ServerConfig)
    assert len(found) == 1, found


@pytest.mark.parametrize("line", MOOT)
def test_a_flag_that_changes_nothing_is_told(line):
    args = parsed(*line.split())
    (note,) = getattr(args, NOTES)
    assert note.startswith(line.split()[0][:2])
    assert "has no effect: " in note
    assert given_values(args, EngineConfig) | given_values(args, ServerConfig) == {}


@pytest.mark.parametrize("line", REFUSED[:-1])
def test_a_flag_that_would_have_to_change_something_is_refused_with_the_reason(capsys, line):
    said = refusal(capsys, *line.split())
    assert re.search(rf"error: {line.split()[0]} is not supported: .{{10,}}", said)
    assert "did you mean" not in said


def test_what_nobody_knows_is_refused_without_a_guess(capsys):
    said = refusal(capsys, REFUSED[-1], "1")
    assert said.endswith("unrecognized arguments: --swap 1"), "no abbreviation either"


def test_every_flag_of_the_table_is_known():
    known = parsed().parser._option_string_actions
    for name in (*ENGINE, *SERVER):
        if name.ours != "model":
            assert set(name.flags) <= known.keys(), name.theirs


@pytest.mark.parametrize(
    ("line", "config", "expected"),
    [
        ("--gpu-memory-utilization 0.9", EngineConfig, {"memory_utilization": 0.9}),
        ("--max-model-len 8k", EngineConfig, {"max_model_len": 8000}),
        ("--max-model-len 8K", EngineConfig, {"max_model_len": 8192}),
        ("--max-model-len 25.6k", EngineConfig, {"max_model_len": 25_600}),
        ("--max-model-len AUTO", EngineConfig, {"max_model_len": "auto"}),
        ("--max-num-seqs=64", EngineConfig, {"max_num_seqs": 64}),
        ("-tp 2", EngineConfig, {"tensor_parallel_size": 2}),
        ("--disable-radix-cache", EngineConfig, {"enable_prefix_caching": False}),
        ("--served-model-name a b", ServerConfig, {"served_model_name": ("a", "b")}),
        ("--api-key a --api-key b", ServerConfig, {"api_keys": ("a", "b")}),
        ('--allowed-origins ["a","b"]', ServerConfig, {"cors_origins": ("a", "b")}),
        ("--disable-uvicorn-access-log", ServerConfig, {"access_log": False}),
    ],
)
def test_values_are_those_that_were_meant(line, config, expected):
    assert given_values(parsed(*line.split()), config) == expected


@pytest.mark.parametrize("text", ["1.5K", "8kk", "k", "1.2345k", "8 k"])
def test_numbers_that_are_none_are_refused(capsys, text):
    assert "invalid int" in refusal(capsys, "--max-model-len", text)


@pytest.mark.parametrize("flag", ["--model", "--model-path", "--model="])
@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_the_model_may_be_named_by_a_flag(flag, command):
    given = [f"{flag}M"] if flag.endswith("=") else [flag, "M"]
    args = cli._parse([command, "--max-num-seqs", "4", *given])
    assert (args.model, given_values(args, EngineConfig)) == ("M", {"max_num_seqs": 4})


def test_two_models_are_one_too_many(capsys):
    assert "the model is given twice: A and MODEL" in refusal(capsys, "--model", "A")


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        (["demo", "--my_var is what?"], "--my_var is what?"),
        (["demo", "--", "--my_var"], "--my_var"),
        (["demo", "--", "--model"], "--model"),
        (["demo", "my_var"], "my_var"),
        (["--seed", "7", "demo", "hello"], "hello"),
        (["demo", "--seed", "7", "hello"], "hello"),
        (["hello", "--model", "demo"], "hello"),
        (["demo", "--stop", "end_of --a_b", "x"], "x"),
        (["demo"], None),
    ],
)
def test_prompts_and_values_are_taken_as_they_are(given, prompt):
    args = cli._parse(["generate", *given])
    assert (args.model, args.prompt) == ("demo", prompt)
    if "--stop" in given:
        assert given_values(args, SamplingParams)["stop"] == ("end_of --a_b",)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "arguments are required: model"),
        (["a", "b", "c"], "unrecognized arguments: c"),
        (["--model", "m", "a", "b"], "given twice"),
        (["--model", "m", "--model", "n"], "given twice"),
        (["--model"], "requires a value"),
    ],
)
def test_what_no_command_takes_is_told(capsys, given, says):
    with pytest.raises(SystemExit):
        cli._parse(["generate", *given])
    assert says in capsys.readouterr().err


# -- files --------------------------------------------------------------------------------


def file(tmp_path, text):
    path = tmp_path / "options.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_has_options_by_name_and_the_line_goes_first(tmp_path):
    text = """
model: of-the-file
max_num_seqs: 4
max-model-len: 8k
no-such: null
enable-prefix-caching: false
enforce-eager: true
served-model-name: [a, b]
api-key: [k, l]
default-chat-template-kwargs: {enable_thinking: false}
trust_remote_code: true
"""
    args = cli._parse(["serve", "--config", file(tmp_path, text), "--max-num-seqs", "8"])
    assert args.model == "of-the-file"
    assert given_values(args, EngineConfig) == {
        "max_num_seqs": 8,
        "max_model_len": 8000,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }
    assert given_values(args, ServerConfig) == {
        "served_model_name": ("a", "b"),
        "api_keys": ("k", "l"),
        "default_chat_template_kwargs": {"enable_thinking": False},
    }
    assert len(getattr(args, NOTES)) == 1
    args = cli._parse(["serve", "LINE", f"--config={file(tmp_path, text)}"])
    assert args.model == "LINE"
    args = cli._parse(["serve", "--api-keys", "new", "--config", file(tmp_path, text)])
    assert given_values(args, ServerConfig)["api_keys"] == ("new",), "by any name of the option"


def test_the_file_of_the_documentation_is_read(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", SERVER_PAGE.read_text(), re.DOTALL)
    args = cli._parse(["serve", "--config", file(tmp_path, text)])
    assert args.model == "Qwen/Qwen3-8B"
    assert EngineConfig(args.model, **given_values(args, EngineConfig)).max_model_len == 32_000
    served = ServerConfig(**given_values(args, ServerConfig))
    assert served.api_keys == ("KEY1", "KEY2")
    assert served.served_model_name == ("qwen3-8b", "default")
    assert served.default_chat_template_kwargs == {"enable_thinking": False}
    given = {**given_values(args, EngineConfig), **given_values(args, ServerConfig)}
    assert len(given) + 1 == len(text.splitlines()), "no line is without effect"


def test_a_files_model_and_a_lines_texts_are_told_apart(tmp_path, capsys):
    config = ["--config", file(tmp_path, "model: M\n")]
    args = cli._parse(["generate", "demo", "hello", *config])
    assert (args.model, args.prompt) == ("demo", "hello")
    args = cli._parse(["generate", *config])
    assert (args.model, args.prompt) == ("M", None)
    with pytest.raises(SystemExit):
        cli._parse(["generate", "demo", *config])
    assert "could be either a model or a prompt" in capsys.readouterr().err


def test_lists_and_switches_of_a_file_are_those_of_the_flags(tmp_path):
    text = "allowed-origins: [a, b]\ndisable-uvicorn-access-log: false\n"
    args = parsed("--config", file(tmp_path, text))
    found = given_values(args, ServerConfig)
    assert found == {"cors_origins": ("a", "b"), "access_log": True}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b", "must map option names to values"),
        ("a: [", "is not valid YAML"),
        ("nonsense: 1", "unrecognized arguments: --nonsense=1"),
        ("enable-lora: true", "--enable-lora is not supported"),
        ("config: other.yaml", "must not contain the option config"),
        ("model: [a, b]", "model must be a string"),
    ],
)
def test_a_file_that_is_wrong_is_told(tmp_path, capsys, text, says):
    assert says in refusal(capsys, "--config", file(tmp_path, text))


def test_a_file_that_is_not_there_is_told(tmp_path, capsys):
    assert "No such file" in refusal(capsys, "--config", str(tmp_path / "none.yaml"))


# -- what does not go together ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ssl_keyfile": "k"}, "must be given together"),
        ({"root_path": "llm"}, "must begin with a slash"),
        ({"served_model_name": [""]}, "must be one or more non-empty strings"),
        ({"tool_call_parser": "pythonic"}, "must be one of auto, hermes"),
        ({"log_level": "loud"}, "must be one of debug"),
    ],
)
def test_options_of_the_server_are_checked(options, says):
    with pytest.raises(InvalidConfig, match=says):
        ServerConfig(**options)
