"""Requests that arrive at random, as a Poisson process, at our engine or at vLLM's async engine.

    python bench/arrivals.py --engine nanoactor|vllm --model 0.6b|8b [--device cuda]
                             [--rates 16 48] [--seconds 20] [--prompt-tokens 100 1024]
                             [--output-tokens 64 256] [--seed 0] [--out FILE]

Random weights of the true configurations, prompts of random token ids, no tokenizer, greedy. The
loop is open: a request starts when it is due, however many are under way. When requests are due and
how long they are depends on the seed and the rate alone, so both engines get the same work. Every
prompt is new, so nothing is cached.

ttft_ms is the time to the first token, gap_ms the time between two deliveries of a stream, tpot_ms
a request's mean time per token after the first, and e2e_ms the time to the last token. ttft_ms and
e2e_ms count from when the request was due. start_late_ms is how late the loop called the engine,
and is part of both. tokens_per_s counts until the last token, so it includes the tail after the
last arrival. A rate is too high for an engine if seconds_after_last_arrival is far above e2e_ms.

vLLM needs to be installed only for --engine vllm. It has the defaults of its own server, which
differ from those of its bare async engine, but for its statistics: they are off, which spares it
time. Both engines have their front end in this process, under uvloop, as their servers do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

import nanoactor
from bench.gpu import MODELS, prompts_of, report
from nanoactor import AsyncLLM, RequestOutputKind, SamplingParams

PERCENTILES = (50, 99)
WARM_UP = 64
"""Requests, all at once."""

Stream = Callable[[list[int], int], AsyncIterator[int]]
"""Take a prompt and the number of tokens to generate, yield how many tokens each delivery has."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One request."""

    due: float
    """In seconds since the first could come."""
    prompt: list[int]
    tokens: int


@dataclasses.dataclass
class Got:
    """The outcome of a request, with times in seconds of the same clock as `Wanted.due`."""

    due: float
    started: float = 0.0
    tokens: int = 0
    deliveries: list[float] = dataclasses.field(default_factory=list)


# -- the engines ------------------------------------------------------------------------------


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that both engines take."""
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": args.max_model_len,
    }
    if args.max_num_batched_tokens:
        options["max_num_batched_tokens"] = args.max_num_batched_tokens
    return options


@contextlib.asynccontextmanager
async def our_engine(args: argparse.Namespace, directory: str) -> AsyncIterator[Stream]:
    options = engine_options(args) | {"max_restarts": 0}
    async with AsyncLLM(directory, device=args.device, **options) as llm:

        async def stream(prompt: list[int], tokens: int) -> AsyncIterator[int]:
            params = SamplingParams.for_model(
                temperature=0.0,
                max_tokens=tokens,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            async for output in llm.generate({"prompt_token_ids": prompt}, params):
                yield len(output.outputs[0].token_ids)

        yield stream


@contextlib.asynccontextmanager
async def vllm_engine(args: argparse.Namespace, directory: str) -> AsyncIterator[Stream]:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind as Kind
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM as Peer

    options = AsyncEngineArgs(model=directory, disable_log_stats=True, **engine_options(args))
    # Without this context it has room for 128 sequences and 2,048 tokens a step; as a server on
    # this GPU, for 1,024 and 8,192.
    engine = Peer.from_engine_args(options, usage_context=UsageContext.OPENAI_API_SERVER)
    numbers = itertools.count()

    async def stream(prompt: list[int], tokens: int) -> AsyncIterator[int]:
        params = vllm.SamplingParams.for_model(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=Kind.DELTA,
        )
        name = str(next(numbers))
        async for output in engine.generate({"prompt_token_ids": prompt}, params, request_id=name):
            yield len(output.outputs[0].token_ids)

    try:
        yield stream
    finally:
        engine.shutdown()


ENGINES = {"nanoactor": our_engine, "vllm": vllm_engine}


# -- the load ---------------------------------------------------------------------------------


def arrivals(args: argparse.Namespace, rate: float) -> list[Wanted]:
    """Return the requests of a rate: the same in every process, for every engine."""
    rng = random.Random(f"{args.seed} {rate:g}")
    dues = [rng.expovariate(rate)]
    while dues[-1] < args.seconds:
        dues.append(dues[-1] + rng.expovariate(rate))
    return requests_at(args, dues[:-1], rng)


def requests_at(args: argparse.Namespace, dues: list[float], rng: random.Random) -> list[Wanted]:
    """Return requests of random lengths and contents that are due at these times."""
    lengths = [rng.randint(*args.prompt_tokens) for _ in dues]
    tokens = [rng.randint(*args.output_tokens) for _ in dues]
    prompts = prompts_of(lengths, rng.getrandbits(64))
    return [Wanted(*one) for one in zip(dues, prompts, tokens, strict=True)]


async def open_loop(requests: list[Wanted], stream: Stream) -> list[Got]:
    """Start each request when it is due and return what became of them all."""
    begin = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - begin

    async def one(wanted: Wanted, got: Got) -> None:
        got.started = now()
        async for tokens in stream(wanted.prompt, wanted.tokens):
            if tokens:
                got.deliveries.append(now())
                got.tokens += tokens
        assert got.tokens == wanted.tokens

    tasks, done = [], []
    for wanted in requests:
        # uvloop's timers count in milliseconds and may end too early by half of one.
        while (left := wanted.due - now()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)
        done.append(Got(wanted.due))
        tasks.append(asyncio.ensure_future(one(wanted, done[-1])))
    await asyncio.gather(*tasks)
    return done


def figures(done: list[Got]) -> dict[str, Any]:
    """Return the percentiles of every time, in ms, and the rates."""
    end = max(got.deliveries[-1] for got in done)
    tokens = sum(got.tokens for got in done)
    times = {
        "ttft_ms": [got.deliveries[0] - got.due for got in done],
        "gap_ms": np.concatenate([np.diff(got.deliveries) for got in done]),
        "tpot_ms": [
            (got.deliveries[-1] - got.deliveries[0]) / (got.tokens - 1)
            for got in done
            if got.tokens > 1
        ],
        "e2e_ms": [got.deliveries[-1] - got.due for got in done],
        "start_late_ms": [got.started - got.due for got in done],
    }
    return {
        "requests": len(done),
        "output_tokens": tokens,
        "tokens_per_s": tokens / (end - done[0].due),
        "tokens_per_delivery": tokens / sum(len(got.deliveries) for got in done),
        "seconds_after_last_arrival": end - done[-1].due,
        "most_at_once": most_at_once(done),
        **{name: percentiles(values) for name, values in times.items()},
    }


def percentiles(seconds: Any) -> dict[str, float]:
    """Return them in ms; none of no values."""
    if not len(seconds):
        return {}
    found = np.percentile(seconds, PERCENTILES) * 1e3
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}


def most_at_once(done: list[Got]) -> int:
    """Return how many requests were under way at the busiest moment."""
    changes = [(got.started, 1) for got in done] + [(got.deliveries[-1], -1) for got in done]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def line(name: str, run: dict[str, Any]) -> str:
    """Return a run in words."""

    def shown(label: str, times: str) -> str:
        return f"{label} " + "/".join(f"{value:.2f}" for value in run[times].values())

    labels = {"ttft_ms": "TTFT", "gap_ms": "gap", "tpot_ms": "TPOT", "e2e_ms": "end to end"}
    return (
        f"{name} {run['rate']:g}/s: {run['requests']} requests, at most {run['most_at_once']} at "
        f"once, {run['tokens_per_s']:,.0f} tokens/s; "
        + ", ".join(shown(label, times) for times, label in labels.items())
        + f" ms (p50/p99); {shown('started late by', 'start_late_ms')} ms; "
        f"{run['tokens_per_delivery']:.3f} tokens per delivery; "
        f"{run['seconds_after_last_arrival']:.2f} s after the last arrival"
    )


async def measure(args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """Return the figures of each rate, from one engine."""
    runs = []
    begin = time.perf_counter()
    async with ENGINES[args.engine](args, directory) as stream:
        start_s = time.perf_counter() - begin
        rng = random.Random(f"{args.seed} warm-up")
        await open_loop(requests_at(args, [0.0] * WARM_UP, rng), stream)
        for rate in args.rates:
            requests = arrivals(args, rate)
            # As both servers do: no collection should look through what was there at the start.
            gc.collect()
            gc.freeze()
            runs.append(
                {"rate": rate, "start_s": start_s, **figures(await open_loop(requests, stream))}
            )
            print(line(f"{args.engine} {args.model}", runs[-1]), flush=True)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=ENGINES, default="nanoactor")
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--device", default="cuda", help="ours only")
    parser.add_argument("--rates", type=float, nargs="+", default=[16, 48], help="requests/s")
    parser.add_argument("--seconds", type=float, default=20.0, help="in which requests arrive")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(100, 1024))
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(64, 256))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int, help="default: the engine's own")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # As vLLM's server does: a fork would take this process's running loop along.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(MODELS[args.model]))
        runs = uvloop.run(measure(args, name))
    ours = args.engine == "nanoactor"
    packages = ("torch", "uvloop") if ours else ("vllm", "torch", "uvloop")
    engine = f"nanoactor {nanoactor.__version__}" if ours else "vLLM"
    results = report(args.model, runs, packages, engine)
    results["question"] = "what do clients see when requests arrive at random?"
    results["device"] = args.device
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    if not ours:
        sys.stdout.flush()
        os._exit(0)  # its processes end with this one


if __name__ == "__main__":
    main()
