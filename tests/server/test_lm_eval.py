"""EleutherAI's lm-evaluation-harness reads the server as it reads the same weights itself."""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoactor.model_files.files import resolve_model
from tests.server.harness import CPU, served

# `make test-long` installs what this needs; without that it fails.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

DEMO = resolve_model("demo")
LENGTH = 1024
"""Of the server's context, which some of the texts exceed."""
TURN = "<|im_start|>{}\n{}"
ENDS = TURN.format("user", "{}<|im_end|>\n") + TURN.format("assistant", "{}")
"""A conversation whose answer may be over."""

TASKS = {
    "choices": dict(
        output_type="multiple_choice",
        doc_to_text="{{query}}",
        doc_to_choice="choices",
        doc_to_target="answer",
        target_delimiter="",
        metric_list=[dict(metric="acc"), dict(metric="acc_norm")],
    ),
    "texts": dict(
        output_type="generate_until",
        doc_to_text="{{query}}",
        doc_to_target="{{target}}",
        generation_kwargs=dict(
            until=["\n\n", " the"], do_sample=False, temperature=0.0, max_gen_toks=48
        ),
        metric_list=[dict(metric="exact_match")],
    ),
    "rolling": dict(
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[dict(metric="word_perplexity"), dict(metric="bits_per_byte")],
    ),
}


def speeches():
    """What the demo was not trained on."""
    text = lzma.decompress((DEMO / "tinyshakespeare.txt.xz").read_bytes()).decode()
    return text[-len(text) // 10 :].split("\n\n")[1:-1]


def examples():
    """Of each task, as the lines of its file."""
    said = speeches()
    pairs = ["\n\n".join(said[at : at + 2]) for at in range(0, 240, 5)]
    choices = []
    for at, text in enumerate(pairs[:24]):
        query, _, line = text.rpartition("\n")
        other = pairs[at + 24].rpartition("\n")[2]
        # From a single token to a line: the harness has to find each one's place in the prompt.
        shown = [f"\n{line}", f"\n{line.split()[0]}", f"\n{other}", "\n", "\nI", "\n\n"]
        choices.append(dict(query=query, choices=shown, answer=0))
    for question in ("Who is there?", "What news?", "Wilt thou come with me?", "Speak, friend."):
        shown = ["KING:\nAy, my lord.", "No, sir.", "No, sir.<|im_end|>", "I know", "I", "KING"]
        choices.append(dict(query=ENDS.format(question, ""), choices=shown, answer=1))
    texts = [dict(query=text.rpartition(" ")[0], target="") for text in pairs[:36]]
    texts += [dict(query=ENDS.format(text, ""), target="") for text in ("Who is there?", "What?")]
    lengths = [1, 2, 5, 9, 20, 50, 100]
    rolling = [dict(text="\n\n".join(said[at : at + size])) for at, size in enumerate(lengths)]
    rolling += [dict(text="I"), dict(text=ENDS.format("What?", "Nothing.<|im_end|>\n"))]
    return dict(choices=choices, texts=texts, rolling=rolling)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A directory of tasks for the harness."""
    directory = tmp_path_factory.mktemp("tasks")
    for name, documents in examples().items():
        data = directory / f"{name}.json"
        data.write_text("\n".join(map(json.dumps, documents)))
        task = dict(
            task=name,
            dataset_path="json",
            dataset_kwargs=dict(data_files=dict(test=str(data))),
            test_split="test",
            metadata=dict(version=1.0),
            **TASKS[name],
        )
        # JSON is YAML.
        (directory / f"{name}.yaml").write_text(json.dumps(task))
    return directory


def evaluate(tasks, out, kind, *arguments, names=tuple(TASKS), **options):
    """Run the harness as a program; returns the answers to each example of each task."""
    shim = ["-m", "nanoactor.compat.vllm"] if kind == "vllm" else ["-m"]
    command = [
        *(sys.executable, *shim, "lm_eval", "run", "--model", kind, "--tasks", ",".join(names)),
        *("--model_args", ",".join(f"{key}={value}" for key, value in options.items())),
        *("--include_path", str(tasks), "--output_path", str(out), "--log_samples", *arguments),
    ]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    environment = {**os.environ, **offline, "HF_DATASETS_CACHE": str(tasks / "cache")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=tasks
    )
    assert done.returncode == 0, done.stderr
    return {name: _answers(next(Path(out).rglob(f"samples_{name}_*.jsonl"))) for name in names}


def _answers(file):
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: one["doc_id"])
    # One answer to each request of an example, as nothing is asked twice.
    return [[answer for (answer,) in sample["resps"]] for sample in samples]


@pytest.fixture(scope="module")
def expected(tasks, tmp_path_factory):
    """What transformers says, of windows as long as those that the server is asked for."""
    weights = tmp_path_factory.mktemp("weights")
    for path in DEMO.glob("[!g]*.*"):
        (weights / path.name).symlink_to(path)
    # The harness gives transformers a max_length, which the file's max_new_tokens would overrule.
    settings = json.loads((DEMO / "generation_config.json").read_text())
    del settings["max_new_tokens"]
    (weights / "generation_config.json").write_text(json.dumps(settings))
    options = dict(
        pretrained=weights, dtype="float32", softmax_dtype="float64", max_length=LENGTH - 2
    )
    arguments = ("--device", "cpu", "--batch_size", "8")
    return evaluate(tasks, tmp_path_factory.mktemp("hf"), "hf", *arguments, **options)


@pytest.fixture(scope="module")
def server():
    with served(*CPU) as server:
        yield server


def said_by(server, at_once, tasks, out, *names):
    """What the server says to the harness, asked in batches of token ids."""
    options = dict(
        model="demo",
        base_url=f"{server.url}/v1/completions",
        tokenizer=DEMO,
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        max_length=LENGTH,
        num_concurrent=at_once,
        max_retries=1,
    )
    arguments = ("--batch_size", "8")
    return evaluate(tasks, out, "local-completions", *arguments, names=names, **options)


# With one batch at a time the harness takes a different way through its code than with several.
@pytest.mark.parametrize("at_once", [1, 4])
def test_the_harness_reads_the_same_texts(at_once, server, tasks, expected, tmp_path):
    found = said_by(server, at_once, tasks, tmp_path, "texts")
    assert found["texts"] == expected["texts"]


@pytest.mark.parametrize("at_once", [1, 4])
def test_the_harness_reads_the_same_likelihoods(at_once, server, tasks, expected, tmp_path):
    found = said_by(server, at_once, tasks, tmp_path, "choices", "rolling")
    for name, answers in found.items():
        assert [*map(len, answers)] == [*map(len, expected[name])]
        values = [likelihood(one) for answer in answers for one in answer]
        right = [likelihood(one) for answer in expected[name] for one in answer]
        # Sums over a few tokens, and over thousands.
        assert [x for x, _ in values] == pytest.approx([x for x, _ in right], abs=1e-4, rel=1e-6)
        assert [greedy for _, greedy in values] == [greedy for _, greedy in right]


@pytest.fixture(scope="module")
def by_vllm(tasks, tmp_path_factory):
    """What its backend says that imports `vllm`, and finds `nanoactor.compat.vllm`."""
    options = dict(pretrained=DEMO, dtype="float32", max_length=LENGTH, threads=1)
    out = tmp_path_factory.mktemp("vllm")
    return evaluate(tasks, out, "vllm", "--batch_size", "auto", **options)


def test_the_vllm_backend_reads_the_same_texts(expected, by_vllm):
    assert by_vllm["texts"] == expected["texts"]


def test_the_vllm_backend_reads_the_same_likelihoods(expected, by_vllm):
    for name in ("choices", "rolling"):
        values = [likelihood(one) for answer in by_vllm[name] for one in answer]
        right = [likelihood(one) for answer in expected[name] for one in answer]
        assert [x for x, _ in values] == pytest.approx([x for x, _ in right], abs=1e-4, rel=1e-6)
        assert [greedy for _, greedy in values] == [greedy for _, greedy in right]


def likelihood(answer):
    """The harness writes numbers as text, and whether each token was the likeliest."""
    value, greedy = answer if isinstance(answer, list) else (answer, None)
    return float(value), greedy


def test_the_examples_have_all_that_matters(server, expected):
    """Or the tests above would compare less than they seem to."""
    greedy = [flag for answer in expected["choices"] for _, flag in answer]
    assert {"True", "False"} == set(greedy)
    assert greedy.count("True") > 20
    # Longer than the context, which has at most four nats a token.
    assert min(float(text) for (text,) in expected["rolling"]) < -4 * LENGTH
    texts = [text for (text,) in expected["texts"]]
    assert len({*texts}) > 25
    # The token that is asked for besides the prompt's, and cut off by its place, may be the end.
    ends = [one for one in examples()["choices"] if one["query"].startswith("<|im_start|>")]
    prompts = [one["query"] + choice for one in ends for choice in one["choices"]]
    values = dict(model="demo", prompt=prompts, max_tokens=1, temperature=0)
    done = server.post("/v1/completions", values).json()["choices"]
    assert {"stop", "length"} == {choice["finish_reason"] for choice in done}
