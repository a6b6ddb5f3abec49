"""Vectors of texts per second, compared with transformers and, if it is installed, with vLLM.

    python bench/embeddings.py [--model demo|0.6b] [--device cpu|cuda] [--lengths 32 512 4096]
        [--tokens 262144] [--rounds 3] [--peers transformers vllm] [--out FILE]

Texts are random token ids, new in every round, of one length in each: as many as have `--tokens`
tokens together, 4096 texts at most. Each engine gets them all at once; transformers gets batches of
`--batch` texts, as it has no batching of its own. Random weights, last-token pooling, bfloat16 on a
GPU and float32 on a CPU. The contenders take turns within a round, so ratios are of neighbours;
each has the device for itself while it runs (an engine that waits uses none).
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import functools
import importlib.metadata
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

import nanoactor
from bench.gpu import MODELS
from nanoactor import AsyncLLM
from nanoactor.model_files.files import DEMO, resolve_model
from nanoactor.runtime.concurrency import run_all

MOST_TEXTS, AT_ONCE = 4096, 4096
Texts = list[list[int]]
Measure = Callable[[Texts], Any]


def texts_of(length: int, tokens: int, seed: int) -> Texts:
    """New texts of one length."""
    rng = random.Random(seed)
    count = max(1, min(MOST_TEXTS, tokens // length))
    return [[rng.randrange(8, 2000) for _ in range(length)] for _ in range(count)]


def write_model(name: str, directory: Path) -> None:
    """A configuration without weights."""
    if name == "demo":
        text = (resolve_model(DEMO) / "config.json").read_text()
    else:
        text = json.dumps(MODELS[name])
    (directory / "config.json").write_text(text)


async def ours(llm: AsyncLLM, texts: Texts) -> float:
    """Seconds until all vectors are there."""
    begin = time.perf_counter()
    calls = [functools.partial(llm.embed, {"prompt_token_ids": text}) for text in texts]
    outputs = await run_all(calls, AT_ONCE)
    assert len(outputs) == len(texts)
    return time.perf_counter() - begin


def transformers(directory: Path, args: argparse.Namespace) -> Callable[[Texts], float]:
    """Batches of one length, without padding: the best case of a plain loop."""
    import torch
    from transformers import AutoConfig, AutoModel

    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device(args.device):
        config = AutoConfig.from_pretrained(directory)
        model = AutoModel.from_config(config, dtype=dtype).eval()

    def measure(texts: Texts) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            for at in range(0, len(texts), args.batch):
                batch = torch.tensor(texts[at : at + args.batch], device=args.device)
                states = model(batch, use_cache=False).last_hidden_state[:, -1].float()
                torch.nn.functional.normalize(states, dim=-1).cpu()
        return time.perf_counter() - begin

    return measure


def vllm(directory: Path, args: argparse.Namespace) -> Callable[[Texts], float]:
    """vLLM's offline engine with its defaults."""
    from vllm import LLM

    llm = LLM(
        str(directory),
        runner="pooling",
        convert="embed",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max(args.lengths) + 1,
        gpu_memory_utilization=0.4,
    )

    def measure(texts: Texts) -> float:
        begin = time.perf_counter()
        outputs = llm.embed([{"prompt_token_ids": text} for text in texts], use_tqdm=False)
        assert len(outputs) == len(texts)
        return time.perf_counter() - begin

    return measure


PEERS = {"transformers": transformers, "vllm": vllm}


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    peers = {name: PEERS[name](directory, args) for name in args.peers}
    rates: dict[str, dict[int, list[float]]] = {}
    options: dict[str, Any] = {"dtype": "float32"} if args.device == "cpu" else {}
    async with AsyncLLM(
        str(directory),
        device=args.device,
        pooling="last",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max(args.lengths) + 1,
        max_num_batched_tokens=args.max_num_batched_tokens,
        memory_utilization=0.4,
        **options,
    ) as llm:
        loop = asyncio.get_running_loop()
        for round_ in range(args.rounds + 1):  # the first warms up
            for number, length in enumerate(args.lengths):
                tokens = args.tokens if round_ else min(args.tokens, 8 * length)
                found: dict[str, float] = {}
                texts = texts_of(length, tokens, round_ * 100 + number)
                for name in ("nanoactor", *peers)[:: 1 if round_ % 2 else -1]:
                    if name == "nanoactor":
                        found[name] = await ours(llm, texts)
                    else:
                        found[name] = await loop.run_in_executor(None, peers[name], texts)
                for name, seconds in found.items():
                    kept = rates.setdefault(name, {}).setdefault(length, [])
                    if round_:
                        kept.append(len(texts) / seconds)
        device = llm.facts["device"]
    found = {name: {str(k): summary(v) for k, v in each.items()} for name, each in rates.items()}
    return {"device": device, "texts_per_s": found}


def summary(values: list[float]) -> dict[str, float]:
    """Median and range, texts per second."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def show(rates: dict[str, Any], args: argparse.Namespace) -> None:
    print(f"{args.model} on {args.device}; texts/s, medians of {args.rounds} rounds (range)")
    for length in map(str, args.lengths):
        own = rates["nanoactor"][length]["median"]
        for name, each in rates.items():
            row = each[length]
            ratio = "" if name == "nanoactor" else f"  ours: {own / row['median']:.2f} times"
            print(
                f"  {length:>5s} tokens  {name:13s} {row['median']:10,.1f} "
                f"({row['low']:,.1f} to {row['high']:,.1f}){ratio}",
                flush=True,
            )


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", choices=("demo", *MODELS), default="demo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 512, 4096])
    parser.add_argument("--tokens", type=int, default=1 << 18, help="of all texts of a length")
    parser.add_argument("--batch", type=int, default=32, help="texts that transformers computes")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=["transformers"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_model(args.model, Path(directory))
        measured = uvloop.run(measure(args, Path(directory)))
    show(measured["texts_per_s"], args)
    if args.out:
        packages = ("torch", "transformers", *(name for name in args.peers if name == "vllm"))
        facts = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "machine": platform.platform(),
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "nanoactor": nanoactor.__version__,
            **measured,
        }
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
