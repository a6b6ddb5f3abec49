"""Measure what constrained answers cost others, on vLLM and here, by the streams' readers.

    python bench/structured_outputs_vllm.py --engine nanoactor|vllm --model 0.6b|8b
        [--rounds 3] [--context 64] [--tokens 300] [--backend xgrammar|guidance] [--out FILE]

64 free streams are measured while each decodes the same tokens: alone, with 16 clients whose
answers follow JSON schemas (one after the other, compact, of at most 200 tokens), and with 16
more free streams. Then one constrained answer after the other alone, and free ones of the same
length. Both engines have random weights of the same shapes, and the same tokenizer, prompts,
schemas and `max_num_seqs`, and no seeds; the rest is their defaults. vLLM has to be installed for
`--engine vllm`; `--backend` is whose grammars it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from gpu import MODELS, arguments
from json_schemas import SCHEMAS
from structured_outputs import (
    CONTENDERS,
    FREE,
    MAX_TOKENS,
    OTHERS,
    PROMPT,
    SETTLE,
    rounded,
    spread,
    write_model,
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request."""

    prompt: list[int]
    max_tokens: int
    schema: dict[str, Any] | None


Delivery = tuple[int, str, str | None]
"""New tokens, new text, and why it has ended."""
Generate = Callable[[Asked], AsyncIterator[Delivery]]


# -- the engines ------------------------------------------------------------------------------


OPTIONS = {"load_format": "dummy", "max_model_len": 20_000, "max_num_seqs": FREE + OTHERS}


@contextlib.asynccontextmanager
async def our_engine(directory: str, args: argparse.Namespace) -> AsyncIterator[Generate]:
    from nanoactor import AsyncLLM, RequestOutputKind, SamplingParams

    async with AsyncLLM(directory, device=args.device, max_restarts=0, **OPTIONS) as llm:

        async def generate(asked: Asked) -> AsyncIterator[Delivery]:
            wanted = {"json": asked.schema, "disable_any_whitespace": True}
            params = SamplingParams.for_model(
                temperature=0.8,
                max_tokens=asked.max_tokens,
                ignore_eos=asked.schema is None,
                output_kind=RequestOutputKind.DELTA,
                structured_outputs=wanted if asked.schema else None,
            )
            async for output in llm.generate({"prompt_token_ids": asked.prompt}, params):
                answer = output.outputs[0]
                yield len(answer.token_ids), answer.text, answer.finish_reason

        yield generate


@contextlib.asynccontextmanager
async def vllm_engine(directory: str, args: argparse.Namespace) -> AsyncIterator[Generate]:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind as Kind
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM as Peer

    grammars = {"backend": args.backend, "disable_any_whitespace": True}
    options = AsyncEngineArgs(
        model=directory, disable_log_stats=True, structured_outputs_config=grammars, **OPTIONS
    )
    engine = Peer.from_engine_args(options, usage_context=UsageContext.OPENAI_API_SERVER)
    numbers = itertools.count()

    async def generate(asked: Asked) -> AsyncIterator[Delivery]:
        wanted = StructuredOutputsParams(json=asked.schema) if asked.schema else None
        params = vllm.SamplingParams(
            temperature=0.8,
            max_tokens=asked.max_tokens,
            ignore_eos=asked.schema is None,
            output_kind=Kind.DELTA,
            structured_outputs=wanted,
        )
        prompt, name = {"prompt_token_ids": asked.prompt}, str(next(numbers))
        async for output in engine.generate(prompt, params, request_id=name):
            answer = output.outputs[0]
            yield len(answer.token_ids), answer.text, answer.finish_reason

    try:
        yield generate
    finally:
        engine.shutdown()


ENGINES = {"nanoactor": our_engine, "vllm": vllm_engine}


def verdict(text: str) -> str:
    """Tell whether an answer that has ended by itself is JSON."""
    try:
        json.loads(text)
    except ValueError:
        return "no JSON"
    return "complete"


# -- the streams ------------------------------------------------------------------------------


class Bench:
    """The same requests, in the same order, for either engine."""

    def __init__(self, generate: Generate, context: int, tokens: int) -> None:
        self.generate, self.context, self.tokens = generate, context, tokens
        self.number = 0
        self.streams: list[int] = []
        """Tokens of each free stream."""
        self.constrained = 0
        """Tokens of those under schemas."""
        self.answers = {"complete": 0, "no JSON": 0, "cut": 0}

    def asked(
        self, max_tokens: int, schema: dict[str, Any] | None = None, length: int = PROMPT
    ) -> Asked:
        """A prompt that is new, and what to do with it. Its tokens are whole characters: of others
        vLLM tells the text with the answer's."""
        self.number += 1
        prompt = [
            (self.number * 13 + at * (self.number % 7 + 1)) % 1500 + 400 for at in range(length)
        ]
        return Asked(prompt, max_tokens, schema)

    async def stream(self, row: int) -> None:
        """A free stream that outlives every window."""
        async for tokens, _, _ in self.generate(self.asked(16_000, length=self.context)):
            self.streams[row] += tokens

    async def answer(self) -> tuple[int, float]:
        """One constrained answer; its tokens, and seconds per token behind the first."""
        schema = SCHEMAS[self.number % len(SCHEMAS)]
        text, tokens, each, reason = await self.timed(self.asked(MAX_TOKENS, schema))
        self.answers[verdict(text) if reason == "stop" else "cut"] += 1
        return tokens, each

    async def timed(self, asked: Asked) -> tuple[str, int, float, str | None]:
        """Text, tokens, seconds per token behind the first delivery, and why it ended."""
        text, total, first, begin, now, reason = "", 0, 0, 0.0, 0.0, None
        async for tokens, more, ended in self.generate(asked):
            now, reason = time.perf_counter(), ended
            text, total = text + more, total + tokens
            self.constrained += tokens * (asked.schema is not None)
            if not first and total:
                first, begin = total, now
        return text, total, (now - begin) / max(1, total - first), reason

    async def client(self) -> None:
        while True:
            await self.answer()

    async def window(self, contender: str) -> dict[str, float]:
        """Tokens a second of the 64 free streams, alone or with others, and of the 16."""
        tasks: list[asyncio.Task[None]] = []
        self.constrained = 0
        if contender == "constrained":
            tasks += [asyncio.ensure_future(self.client()) for _ in range(OTHERS)]
            await self.until(tasks, lambda: self.constrained >= 8 * OTHERS)
        rows = FREE + OTHERS * (contender == "free")
        self.streams = [0] * rows
        tasks += [asyncio.ensure_future(self.stream(row)) for row in range(rows)]
        await self.until(tasks, lambda: min(self.streams) >= SETTLE)
        free, constrained, begin = sum(self.streams), self.constrained, time.perf_counter()
        await self.until(tasks, lambda: min(self.streams) >= SETTLE + self.tokens)
        passed = time.perf_counter() - begin
        free, constrained = sum(self.streams) - free, self.constrained - constrained
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.5)
        return {
            "tokens_per_s": free / passed * FREE / rows,
            "constrained_tokens_per_s": constrained / passed,
        }

    async def until(self, tasks: list[asyncio.Task[None]], done: Callable[[], bool]) -> None:
        """Wait; no stream may end meanwhile."""
        while not done():
            for task in tasks:
                if task.done():
                    task.result()
                    raise AssertionError("a stream ended inside a window")
            await asyncio.sleep(0.002)

    async def alone(self) -> dict[str, float]:
        """Milliseconds a token of answers alone: constrained ones, and free ones as long."""
        times: dict[str, list[float]] = {"constrained": [], "free": []}
        for _ in range(8):
            tokens, each = await self.answer()
            if tokens < 16:  # some say no more than {}
                continue
            _, _, free, _ = await self.timed(self.asked(tokens))
            times["constrained"].append(each * 1e3)
            times["free"].append(free * 1e3)
        return {f"{name}_ms": statistics.median(found) for name, found in times.items()}


async def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    async with ENGINES[args.engine](model, args) as generate:
        started = time.perf_counter() - begin
        bench = Bench(generate, args.context, args.tokens)
        await asyncio.gather(*(bench.answer() for _ in range(2 * len(SCHEMAS))))
        await bench.window("constrained")
        rounds: list[dict[str, Any]] = []
        for number in range(args.rounds):
            turns = CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]
            windows = {name: await bench.window(name) for name in turns}
            rounds.append({**windows, "single": await bench.alone()})
    rates = {name: [row[name]["tokens_per_s"] for row in rounds] for name in CONTENDERS}
    ratios = {
        name: spread([a / b for a, b in zip(rates[name], rates["alone"], strict=True)])
        for name in CONTENDERS[1:]
    }
    constrained = [row["constrained"]["constrained_tokens_per_s"] for row in rounds]
    return {
        "start_s": started,
        "answers": bench.answers,
        "tokens_per_s": {name: spread(values) for name, values in rates.items()},
        "ratio": ratios,
        "constrained_tokens_per_s": spread(constrained),
        "single": {
            name: spread([row["single"][name] for row in rounds])
            for name in ("constrained_ms", "free_ms")
        },
        "rounds": rounds,
    }


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--engine", choices=tuple(ENGINES), required=True)
    parser.add_argument("--model", choices=("demo", *MODELS), default="0.6b")
    parser.add_argument("--device", default="cuda", help="for this engine")
    parser.add_argument("--backend", choices=("xgrammar", "guidance"), default="xgrammar")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=PROMPT, help="of the free streams at first")
    parser.add_argument("--tokens", type=int, default=300, help="of each free stream, in a window")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.vocabulary = 0
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(args, Path(directory))
        as_text = json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        )
        about_tokenizer = Path(model) / "tokenizer_config.json"
        about_tokenizer.unlink(missing_ok=True)  # the demo's is a link
        about_tokenizer.write_text(as_text)
        found = uvloop.run(measure(model, args))
    packages: tuple[str, ...] = ("llguidance", "uvloop")
    if args.engine == "vllm":
        packages += ("vllm", "torch", "xgrammar")
    report = {
        "question": "what do constrained answers cost others?",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", "bench/structured_outputs_vllm.py", *arguments()]),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "versions": {name: importlib.metadata.version(name) for name in packages},
        **found,
    }
    if args.device.startswith("cuda"):
        import torch

        report["machine"] += ", " + torch.cuda.get_device_name()
    shown = {name: value for name, value in report.items() if name != "rounds"}
    print(json.dumps(rounded(shown), indent=1))
    if args.out:
        args.out.write_text(json.dumps(rounded(report), indent=1) + "\n")


if __name__ == "__main__":
    main()
