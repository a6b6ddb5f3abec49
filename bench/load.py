"""Load on an OpenAI-compatible server: when requests come, what they ask, when answers come.

Used by serving.py, in a process of its own; it runs by itself too:

    python bench/load.py http://127.0.0.1:8000 --model demo [--rate 20 | --concurrency 64]
        [--requests 512] [--prompt 100 1024] [--output 100 1024] [--trace FILE.jsonl] [--seed 0]

Requests are streams of `/v1/completions` with prompts of token ids. *Open loop*: they come at a
rate, as a Poisson process, however long answers take. *Closed loop*: as many as `--concurrency` are
under way all the time. A trace has a JSON object a line: `prompt_tokens`, `output_tokens`, and
`at`, the seconds from the start at which the request comes (without it, the rate decides).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvloop

PERCENTILES = (50, 90, 99)
_EVENT, _DONE = b"data: {", b"data: [DONE]"
_TAIL = 4096


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One request."""

    prompt: list[int]
    output: int
    at: float | None = None


@dataclasses.dataclass
class Got:
    """The outcome of a request, with times in seconds of the monotonic clock."""

    begin: float
    """When it was due: a client that is late to send counts against the server."""
    arrivals: list[float] = dataclasses.field(default_factory=list)
    """Of the pieces of its answer."""
    chunks: int = 0
    tokens: int = 0
    error: str = ""


def workload(args: argparse.Namespace) -> list[Wanted]:
    """The requests, from a trace or drawn at random."""
    rng = np.random.default_rng(args.seed)

    def prompt(length: int) -> list[int]:
        ids: list[int] = rng.integers(3, args.vocabulary, length).tolist()
        return ids

    if args.trace:
        lines = [json.loads(line) for line in Path(args.trace).read_text().splitlines() if line]
        return [
            Wanted(prompt(line["prompt_tokens"]), line["output_tokens"], line.get("at"))
            for line in lines[: args.requests]
        ]
    prompts = rng.integers(args.prompt[0], args.prompt[1] + 1, args.requests).tolist()
    outputs = rng.integers(args.output[0], args.output[1] + 1, args.requests).tolist()
    return [Wanted(prompt(p), o) for p, o in zip(prompts, outputs, strict=True)]


# -- one request over HTTP ----------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """Reads an answer, and looks at no more of it than it must: the client shares the machine."""

    def __init__(self, got: Got) -> None:
        self.got = got
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""
        self._status = b""

    def data_received(self, data: bytes) -> None:
        """Count the events."""
        now = time.monotonic()
        seen = self._tail[-len(_EVENT) + 1 :] + data
        if not self._status:
            self._status = data[9:12]
        events = seen.count(_EVENT)
        if events:
            self.got.chunks += events
            self.got.arrivals.append(now)
        self._tail = (self._tail + data)[-_TAIL:]
        if _DONE in self._tail:
            self._end()
        elif self._status != b"200" and b"\r\n\r\n" in self._tail:
            self.got.error = f"status {self._status.decode()}"
            self._end()

    def _end(self) -> None:
        if self.ended.done():
            return
        if not self.got.error:
            at = self._tail.rfind(b'"completion_tokens":')
            digits = self._tail[at + 20 : at + 30].split(b",")[0]
            self.got.tokens = int(digits) if at >= 0 else 0
            self.got.chunks -= 1  # the usage
        self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Before its end?"""
        if not self.ended.done():
            self.got.error = "connection lost"
            self.ended.set_result(None)


async def over_http(url: str, model: str, wanted: Wanted, got: Got, key: str = "") -> None:
    """Send one request and read its answer."""
    parts = urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "prompt": wanted.prompt,
            "max_tokens": wanted.output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    transport = None
    try:
        transport, connection = await loop.create_connection(
            lambda: _Connection(got), parts.hostname, parts.port
        )
        transport.write(head.encode() + body)
        await connection.ended
    except OSError as error:
        got.error = str(error)
    finally:
        if transport is not None:
            transport.close()


# -- many ---------------------------------------------------------------------------------

Ask = Callable[[Wanted, Got], Awaitable[None]]


async def closed_loop(requests: list[Wanted], concurrency: int, ask: Ask) -> list[Got]:
    """So many under way all the time."""
    waiting, done = iter(requests), []

    async def worker() -> None:
        for wanted in waiting:
            got = Got(time.monotonic())
            await ask(wanted, got)
            done.append(got)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done


async def open_loop(requests: list[Wanted], rate: float, seed: int, ask: Ask) -> list[Got]:
    """As a Poisson process, or when their trace says."""
    rng, begin, at = random.Random(seed), time.monotonic(), 0.0
    tasks, done = [], []
    for wanted in requests:
        at = wanted.at if wanted.at is not None else at + rng.expovariate(rate)
        await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
        got = Got(begin + at)
        done.append(got)
        tasks.append(asyncio.ensure_future(ask(wanted, got)))
    await asyncio.gather(*tasks)
    return done


def summary(done: list[Got], seconds: float) -> dict[str, Any]:
    """Figures of a run; times in ms."""
    good = [got for got in done if not got.error]
    tokens = sum(got.tokens for got in good)
    gaps = [np.diff(got.arrivals) for got in good if len(got.arrivals) > 1]
    figures: dict[str, Any] = {
        "requests": len(done),
        "errors": len(done) - len(good),
        "kinds_of_errors": sorted({got.error for got in done if got.error}),
        "seconds": seconds,
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
        "chunks_per_token": sum(got.chunks for got in good) / max(1, tokens),
    }
    times = {
        "ttft": [got.arrivals[0] - got.begin for got in good if got.arrivals],
        "tpot": [
            (got.arrivals[-1] - got.arrivals[0]) / (got.tokens - 1)
            for got in good
            if got.tokens > 1 and got.arrivals
        ],
        "gap": np.concatenate(gaps) if gaps else [],
        "e2e": [got.arrivals[-1] - got.begin for got in good if got.arrivals],
    }
    for name, values in times.items():
        found = np.percentile(values, PERCENTILES) * 1000 if len(values) else [float("nan")] * 3
        figures[name] = {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}
    return figures


async def run(args: argparse.Namespace, ask: Ask) -> dict[str, Any]:
    """The whole load."""
    requests = workload(args)
    begin = time.monotonic()
    if args.concurrency:
        done = await closed_loop(requests, args.concurrency, ask)
    else:
        done = await open_loop(requests, args.rate, args.seed, ask)
    return summary(done, time.monotonic() - begin)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both programs take."""
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second, open loop")
    parser.add_argument("--concurrency", type=int, default=0, help="closed loop instead")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, nargs=2, default=(100, 1024), metavar=("LO", "HI"))
    parser.add_argument("--output", type=int, nargs=2, default=(100, 1024), metavar=("LO", "HI"))
    parser.add_argument("--trace", help="a JSONL file with lengths, perhaps with times")
    parser.add_argument("--vocabulary", type=int, default=2048, help="prompts are ids below this")
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    """A load by itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--api-key", default="")
    add_options(parser)
    args = parser.parse_args()

    async def ask(wanted: Wanted, got: Got) -> None:
        await over_http(args.url, args.model, wanted, got, args.api_key)

    json.dump(uvloop.run(run(args, ask)), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
