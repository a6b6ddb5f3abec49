"""lm-evaluation-harness against the server: its verdicts are those of the log-probabilities."""

import importlib.util
import json
import runpy

import pytest

from tests.examples.running import run
from tests.product_files import ROOT
from tests.server.harness import CPU, served

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm_eval is not installed: pip install 'nanoactor[eval]'",
    ),
]


def likelihood(server, question, choice):
    """The sum of the log-probabilities of a choice's tokens behind a question."""
    body = {"model": "demo", "prompt": f"{question} {choice}", "echo": True, "logprobs": 1}
    found = server.post("/v1/completions", body | {"max_tokens": 0}).json()["choices"][0]
    offsets, values = found["logprobs"]["text_offset"], found["logprobs"]["token_logprobs"]
    return sum(v for at, v in zip(offsets, values, strict=True) if at >= len(question))


def test_a_task_of_our_own_is_judged(tmp_path):
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    offline["HF_DATASETS_CACHE"] = str(tmp_path)
    questions = runpy.run_path(str(ROOT / "examples" / "evaluation.py"))["QUESTIONS"]
    with served(*CPU) as server:
        said = run("evaluation.py", "--url", f"{server.url}/v1", **offline)
        right = normalized = 0
        for one in questions:
            sums = [likelihood(server, one["question"], choice) for choice in one["choices"]]
            lengths = [len(choice) for choice in one["choices"]]
            shares = [total / length for total, length in zip(sums, lengths, strict=True)]
            right += sums.index(max(sums)) == one["answer"]
            normalized += shares.index(max(shares)) == one["answer"]
    found = json.loads(said[said.index("{") :])["shakespeare"]
    assert found["sample_len"] == len(questions)
    assert found["acc,none"] == right / len(questions)
    assert found["acc_norm,none"] == normalized / len(questions)
    assert 0 < found["acc,none"] < found["acc_norm,none"], "or the figures would tell little"
