"""Measure what each parameter of sampling costs a decode step.

    python bench/sampling.py [--model demo|0.6b] [--device cuda|cpu] [--batches 1 64 256]
        [--rounds 3] [--before CHECKOUT] [--out FILE]

All rows of a step ask for the same: 128 tokens of prompt, then a window of steps in which every row
decodes. Milliseconds per step by the device's own clock: medians of the rounds, and every value.
0.6b is Qwen3-0.6B's true configuration with random weights. With `--before`, the directory of
another version, that version does the ways it knows in a process of its own, alternating with
this one: `greedy`, `plain`, `top_k`, `top_p`, `min_p`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPT, WARM = 128, 20
STEPS = {"cuda": 150, "cpu": 60}
TOKENS = {"cuda": 700, "cpu": 300}
QWEN3_06B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
KNOWN = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
}
RULES = {
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "logprobs_plain": {"temperature": 0.8, "logprobs": 5},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.1, "repetition_penalty": 1.1},
    "logit_bias": {"temperature": 0.0, "logit_bias": dict.fromkeys(range(10, 20), 1.0)},
    "allowed_token_ids": {"temperature": 0.0, "allowed_token_ids": list(range(10, 60))},
}


async def window(llm: Any, rows: int, way: dict[str, Any], device: str) -> float:
    """Return the milliseconds of a step in which so many rows decode."""
    from nanoactor import RequestOutputKind, SamplingParams

    params = SamplingParams.for_model(
        max_tokens=TOKENS[device], ignore_eos=True, output_kind=RequestOutputKind.DELTA, **way
    )
    decoding, left, started = 0, asyncio.Event(), asyncio.Event()

    async def one(number: int) -> None:
        nonlocal decoding
        first = True
        prompt = {"prompt_token_ids": [(7 * number + at) % 1000 + 1 for at in range(PROMPT)]}
        async for _ in llm.generate(prompt, params):
            decoding += first
            first = False
            if decoding == rows:
                started.set()
        left.set()

    async def figures() -> tuple[int, float]:
        actor = (await llm.statistics())["runner.0"]["actor"]
        return actor["steps_done"], actor["busy_seconds"]

    tasks = [asyncio.ensure_future(one(number)) for number in range(rows)]
    await started.wait()
    begin = (await figures())[0] + WARM
    before = await figures()
    while before[0] < begin:
        await asyncio.sleep(0.003)
        before = await figures()
    after = before
    while after[0] < before[0] + STEPS[device]:
        await asyncio.sleep(0.003)
        after = await figures()
    assert not left.is_set(), "a row ended inside the window"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return (after[1] - before[1]) / (after[0] - before[0]) * 1e3


async def measure(model: str, args: argparse.Namespace, ways: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds by way and batch, every round."""
    from nanoactor import AsyncLLM

    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": max(args.batches)}
    options["max_restarts"] = 0
    if args.model != "demo":
        options |= {"load_format": "dummy", "max_model_len": 2048}
    found: dict[str, Any] = {name: {str(rows): [] for rows in args.batches} for name in ways}
    async with AsyncLLM(model, device=args.device, **options) as llm:
        for rows in args.batches:
            await window(llm, rows, {"temperature": 0.0}, args.device)
            for _ in range(args.rounds):
                for name, way in ways.items():
                    took = await window(llm, rows, way, args.device)
                    found[name][str(rows)].append(round(took, 4))
    return found


def work(args: argparse.Namespace) -> dict[str, Any]:
    """Measure in this process."""
    ways = dict(KNOWN) if args.known else {**KNOWN, **RULES}
    if args.model == "demo":
        return asyncio.run(measure("demo", args, ways))
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_06B))
        return asyncio.run(measure(directory, args, ways))


def run_of(checkout: Path, args: argparse.Namespace, known: bool) -> dict[str, Any]:
    """Measure with a version in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    command += ["--model", args.model, "--device", args.device, "--rounds", str(args.rounds)]
    command += ["--batches", *map(str, args.batches), *(["--known"] if known else [])]
    path = os.pathsep.join(filter(None, (str(checkout.resolve()), os.environ.get("PYTHONPATH"))))
    told = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=checkout,
    ).stdout
    return dict(json.loads(told.splitlines()[-1]))


def medians(found: dict[str, Any]) -> dict[str, Any]:
    """The medians of all rounds."""
    return {
        name: {rows: round(statistics.median(values), 4) for rows, values in by_rows.items()}
        for name, by_rows in found.items()
    }


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", choices=("demo", "0.6b"), default="0.6b")
    parser.add_argument("--device", choices=tuple(STEPS), default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--known", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(work(args)))
        return
    here = Path(__file__).resolve().parent.parent
    found = {"now": run_of(here, args, known=False)}
    if args.before:
        found["before"] = run_of(args.before, args, known=True)
        found["now, again"] = run_of(here, args, known=True)
    sys.path.insert(0, str(here))
    import nanoactor

    words = [word for word in sys.argv[1:] if word not in ("--out", str(args.out))]
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "bench/sampling.py", *words]),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "versions": {
            "nanoactor": nanoactor.__version__,
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
        },
        "ms_per_step": {name: medians(values) for name, values in found.items()},
        "all": found,
    }
    if args.device == "cuda":
        import torch

        report["machine"] = torch.cuda.get_device_name()
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
