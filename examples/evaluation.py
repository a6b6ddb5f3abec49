"""Measure a model with lm-evaluation-harness, through the server.

    pip install 'nanoactor[eval]'
    nanoactor serve demo                       # in another terminal
    python examples/evaluation.py              # four questions, written below
    python examples/evaluation.py --tasks arc_easy,hellaswag --limit 100 --tokenizer Qwen/Qwen3-0.6B

A multiple-choice task compares how likely the model finds each answer. The harness asks the server
for the log-probabilities of the tokens of each one (`/v1/completions` with `echo`), many at a time.
"""

import argparse
import json
import urllib.request
from typing import Any

import datasets
import lm_eval

from nanoactor.model_files.files import resolve_model

QUESTIONS = [
    {
        "question": "But, soft! what light through yonder window",
        "choices": ["breaks", "potato", "seventeen"],
        "answer": 0,
    },
    {
        "question": "Now is the winter of our",
        "choices": ["tractor", "discontent", "is"],
        "answer": 1,
    },
    {
        "question": "O Romeo, Romeo! wherefore art thou",
        "choices": ["the", "fifty", "Romeo"],
        "answer": 2,
    },
    {
        "question": "Good night, good night! Parting is such sweet",
        "choices": ["sorrow", "of", "gravel"],
        "answer": 0,
    },
]
OWN_TASK: dict[str, Any] = {
    "task": "shakespeare",
    "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(QUESTIONS)},
    "output_type": "multiple_choice",
    "test_split": "test",
    # Templates over the fields of a question. A choice is appended with a space.
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    # `acc`: the likeliest answer is right. `acc_norm`: likewise, per byte of its length.
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


def main() -> None:
    """Read the command line, evaluate, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description="Measure a model with lm-evaluation-harness.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the one that the server has")
    parser.add_argument("--tokenizer", help="its directory or name on the hub; default: the model")
    parser.add_argument("--tasks", help="names, separated by commas; default: our own task")
    parser.add_argument("--limit", type=int, help="questions of each task; default: all")
    given = parser.parse_args()
    with urllib.request.urlopen(f"{given.url}/models") as reply:
        model = given.model or json.load(reply)["data"][0]["id"]
    # The harness splits prompt and answer by tokens, so it needs the model's own tokenizer. The
    # server's name for the model may differ from the hub's.
    tokenizer = resolve_model(given.tokenizer or model, weights=False)

    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{given.url}/completions",
            "tokenizer": str(tokenizer),
            "tokenizer_backend": "huggingface",
            "num_concurrent": 8,  # requests at once, of `batch_size` texts each
            "max_retries": 3,
        },
        batch_size=8,
        tasks=given.tasks.split(",") if given.tasks else [OWN_TASK],
        limit=given.limit,
        bootstrap_iters=0,
    )
    assert results is not None
    print(json.dumps(results["results"], indent=2, default=str))


if __name__ == "__main__":
    main()
