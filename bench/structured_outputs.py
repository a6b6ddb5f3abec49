"""Measure what constrained answers cost, and what they cost others.

    python bench/structured_outputs.py [--device cuda|cpu|simulated:MS] [--model demo|0.6b|8b]
        [--vocabulary 151936] [--context 64] [--modes 2-eager 2-late 1-eager]
        [--max-pipeline-depth 4] [--no-jump-forward] [--rounds 3] [--tokens 300] [--out FILE]

64 free streams, of prompts of `--context` tokens, are measured in windows in which each of them
decodes the same `--tokens`, as a step takes longer the longer contexts are: alone, with 16
clients whose answers follow JSON schemas (one after the other, of at most 200 tokens behind a
prompt of 64), and with 16 more free streams. Only the 64 count; ratios are of neighbours in a
round. `us_per_token` is what a token of the other streams adds to a step; those of constrained ones
include their prompts. Then one constrained answer alone, and a free one of the same length. A mode
is a pipeline depth and when steps are planned; at depth 1 both ways of planning are the same.

`steps_per_token` counts the steps of the engine for each token of a client's, the time between its
answers included. `forced` is the share of tokens that nobody chose; random weights spell names in
odd pieces, which a real model does not. `chosen` tells when the others were: in the step that
computes the position before (`at_once`), in the next, or later. 0.6b and 8b have Qwen3's true
configurations, random weights and, as `--vocabulary` gives the demo, a made-up tokenizer of as many
tokens.
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
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from gpu import MODELS, arguments
from json_schemas import SCHEMAS
from made_up_tokenizer import SPECIAL, write_tokenizer

import nanoactor
from nanoactor import AsyncLLM, RequestOutputKind, SamplingParams
from nanoactor.model_files.files import DEMO, resolve_model

FREE, OTHERS = 64, 16
PROMPT, MAX_TOKENS = 64, 200
SETTLE = 64
"""Tokens of each free stream before its window."""
CONTENDERS = ("alone", "constrained", "free")
USED = ("at_once", "next_step", "later")


def write_model(args: argparse.Namespace, directory: Path) -> str:
    """A model that allows long outputs, and its tokenizer."""
    demo = resolve_model(DEMO)
    config = json.loads((demo / "config.json").read_text())
    config["max_position_embeddings"] = 32768
    vocabulary = args.vocabulary
    if args.model != "demo":
        config = dict(MODELS[args.model])
        vocabulary = config["vocab_size"]
    if vocabulary:
        eos = write_tokenizer(directory, vocabulary - SPECIAL)
        config |= {"vocab_size": vocabulary, "eos_token_id": eos}
    else:
        for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            (directory / name).symlink_to(demo / name)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def mode_of(name: str) -> tuple[int, str]:
    depth, lead = name.split("-")
    if lead not in ("eager", "late"):
        raise ValueError(f"{name}: planning is eager or late")
    return int(depth), lead


class Bench:
    """One engine."""

    def __init__(self, llm: AsyncLLM, tokens: int, context: int) -> None:
        self.llm, self.tokens, self.context = llm, tokens, context
        self.number = 0
        self.streams: list[int] = []
        """Tokens of each free stream."""
        self.answers = {"complete": 0, "cut": 0, "tokens": 0}

    def request(
        self, max_tokens: int, *, length: int = PROMPT, **options: Any
    ) -> tuple[dict[str, Any], SamplingParams]:
        """A prompt that is new, and what to do with it."""
        self.number += 1
        prompt = [
            (self.number * 13 + at * (self.number % 7 + 1)) % 1900 + 8 for at in range(length)
        ]
        params = SamplingParams.for_model(
            temperature=0.8,
            seed=self.number,
            max_tokens=max_tokens,
            output_kind=RequestOutputKind.DELTA,
            **options,
        )
        return {"prompt_token_ids": prompt}, params

    async def stream(self, number: int) -> None:
        """A free stream that outlives every window."""
        request = self.request(16_000, length=self.context, ignore_eos=True)
        async for output in self.llm.generate(*request):
            self.streams[number] += len(output.outputs[0].token_ids)

    async def reach(self, tokens: int, tasks: list[asyncio.Task[None]]) -> dict[str, Any]:
        """Return what the scheduler tells once each free stream has so many tokens."""
        while min(self.streams) < tokens:
            check(tasks)
            await asyncio.sleep(0.002)
        return await self.scheduler()

    async def answer(self) -> tuple[int, float]:
        """One constrained answer; its tokens, and seconds per token behind the first."""
        schema = SCHEMAS[self.number % len(SCHEMAS)]
        compact = bool(self.number // len(SCHEMAS) % 2)
        wanted = {"json": schema, "disable_any_whitespace": compact}
        text, tokens, each, reason = await self.timed(MAX_TOKENS, structured_outputs=wanted)
        if reason == "stop":
            json.loads(text)
        self.answers["complete" if reason == "stop" else "cut"] += 1
        self.answers["tokens"] += tokens
        return tokens, each

    async def timed(self, max_tokens: int, **options: Any) -> tuple[str, int, float, str | None]:
        """Text, tokens, seconds per token behind the first delivery, and why it ended."""
        text, tokens, first, begin, now = "", 0, 0, 0.0, 0.0
        async for output in self.llm.generate(*self.request(max_tokens, **options)):
            now = time.perf_counter()
            text += output.outputs[0].text
            tokens += len(output.outputs[0].token_ids)
            if not first and tokens:
                first, begin = tokens, now
        reason = output.outputs[0].finish_reason
        return text, tokens, (now - begin) / max(1, tokens - first), reason

    async def client(self) -> None:
        while True:
            await self.answer()

    async def scheduler(self) -> dict[str, Any]:
        told = await self.llm.statistics()
        figures = told["scheduler"]["actor"]
        figures["busy"] = told["runner.0"]["actor"]["busy_seconds"]
        figures["used"] = sum(figures[f"masks_{name}"] for name in USED)
        figures["constrained_tokens"] = figures["used"] + figures["forced_tokens"]
        return dict(figures)

    async def window(self, contender: str) -> dict[str, Any]:
        """A stretch in which 64 free streams decode the same contexts, alone or with others."""
        rows = FREE + OTHERS * (contender == "free")
        tasks: list[asyncio.Task[None]] = []
        if contender == "constrained":
            wanted = (await self.scheduler())["used"] + 4 * OTHERS
            tasks += [asyncio.ensure_future(self.client()) for _ in range(OTHERS)]
            while (await self.scheduler())["used"] < wanted:
                check(tasks)
                await asyncio.sleep(0.02)
        self.streams = [0] * rows
        tasks += [asyncio.ensure_future(self.stream(number)) for number in range(rows)]
        before = await self.reach(SETTLE, tasks)
        after = await self.reach(SETTLE + self.tokens, tasks)
        grammar = (await self.llm.statistics())["grammar"]["actor"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while (await self.scheduler())["live"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return self.figures(before, after, grammar, FREE / rows)

    def figures(
        self, before: dict[str, Any], after: dict[str, Any], grammar: dict[str, Any], share: float
    ) -> dict[str, Any]:
        """The figures of a window. `share`: of the decoded tokens, those that count."""
        change = {name: after[name] - before[name] for name in before if name != "clock"}
        seconds = change["step_at"] * 1e-9
        found = {
            "tokens_per_s": change["decode_tokens"] * share / seconds,
            "ms_per_step": seconds * 1e3 / change["steps"],
            "device_idle": 1 - change["busy"] / seconds,
        }
        if not change["used"]:
            return found
        return found | {
            "constrained_tokens_per_s": change["constrained_tokens"] / seconds,
            "steps_per_token": OTHERS * change["steps"] / change["constrained_tokens"],
            "forced": change["forced_tokens"] / change["constrained_tokens"],
            "chosen": shares(change),
            **{name: grammar[name] for name in ("mask_us_p50", "mask_us_p99")},
        }

    async def alone(self) -> dict[str, Any]:
        """A constrained answer on an idle engine, then a free one of the same length."""
        before = await self.scheduler()
        tokens = 0
        while tokens < 16:  # some say no more than {}
            tokens, constrained = await self.answer()
        after = await self.scheduler()
        _, _, free, _ = await self.timed(tokens, ignore_eos=True)
        change = {name: after[name] - before[name] for name in before}
        return {
            "tokens": tokens,
            "constrained_ms": constrained * 1e3,
            "free_ms": free * 1e3,
            "ratio": constrained / free,
            "steps_per_token": change["steps"] / change["constrained_tokens"],
            "forced": change["forced_tokens"] / change["constrained_tokens"],
            "chosen": shares(change),
        }


def check(tasks: list[asyncio.Task[None]]) -> None:
    """Raise what a task has raised; none may end inside a window."""
    for task in tasks:
        if task.done():
            task.result()
            raise AssertionError("a stream ended inside a window")


def shares(change: dict[str, Any]) -> dict[str, float]:
    return {name: change[f"masks_{name}"] / change["used"] for name in USED}


async def measure(model: str, args: argparse.Namespace, mode: str) -> dict[str, Any]:
    depth, lead = mode_of(mode)
    options: dict[str, Any] = {} if args.model == "demo" else {"load_format": "dummy"}
    if args.model == "demo":
        options["num_kv_blocks"] = (FREE + OTHERS) * 512
    begin = time.perf_counter()
    async with AsyncLLM(
        model,
        device=args.device,
        max_num_seqs=FREE + OTHERS,
        max_model_len=20_000,
        pipeline_depth=depth,
        max_pipeline_depth=args.max_pipeline_depth,
        plan_lead=lead,
        jump_forward=args.jump_forward,
        max_restarts=0,
        **options,
    ) as llm:
        started = time.perf_counter() - begin
        bench = Bench(llm, args.tokens, args.context)
        await asyncio.gather(*(bench.answer() for _ in range(2 * len(SCHEMAS))))
        compiled = (await llm.statistics())["grammar"]["actor"]
        rounds = []
        for number in range(args.rounds):
            turns = CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]
            windows = {name: await bench.window(name) for name in turns}
            single = [await bench.alone() for _ in range(2)]
            rounds.append({**{name: windows[name] for name in CONTENDERS}, "single": single})
        ms = compiled["grammar_seconds"] / compiled["grammars"] * 1e3
    return {
        "mode": mode,
        "start_s": started,
        "first_grammars_ms": ms,
        "answers": bench.answers,
        **summary(rounds),
        "rounds": rounds,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians and ranges of all rounds."""
    constrained = [row["constrained"] for row in rounds]
    singles = [single for row in rounds for single in row["single"]]
    rates = {name: [row[name]["tokens_per_s"] for row in rounds] for name in CONTENDERS}
    names = ("constrained_tokens_per_s", "steps_per_token", "forced", "mask_us_p50", "mask_us_p99")
    return {
        "tokens_per_s": {name: spread(values) for name, values in rates.items()},
        "ratio": {
            name: spread([a / b for a, b in zip(rates[name], rates["alone"], strict=True)])
            for name in CONTENDERS[1:]
        },
        "us_per_token": {
            name: spread([us_per_token(row, name) for row in rounds]) for name in CONTENDERS[1:]
        },
        "beside": {
            **{name: spread([row[name] for row in constrained]) for name in names},
            "chosen": {name: spread([row["chosen"][name] for row in constrained]) for name in USED},
        },
        "single": {
            **{
                name: spread([single[name] for single in singles])
                for name in ("constrained_ms", "free_ms", "ratio", "steps_per_token", "forced")
            },
            "chosen": {name: spread([row["chosen"][name] for row in singles]) for name in USED},
        },
    }


def us_per_token(row: dict[str, Any], contender: str) -> float:
    """Return the microseconds that a token of the other streams adds to a step."""
    alone, beside = row["alone"]["ms_per_step"], row[contender]["ms_per_step"]
    rate = row[contender].get("constrained_tokens_per_s", OTHERS * 1e3 / beside)
    return float((beside - alone) * 1e6 / (rate * beside))


def shown(value: dict[str, float], form: str) -> str:
    low, median, high = (format(value[name], form) for name in ("low", "median", "high"))
    return f"{median} ({low} to {high})"


def show(run: dict[str, Any]) -> None:
    """A table of one mode."""
    beside, single = run["beside"], run["single"]
    steps = {name: [row[name]["ms_per_step"] for row in run["rounds"]] for name in CONTENDERS}
    print(f"\nmode {run['mode']}; medians of {len(run['rounds'])} rounds (lowest to highest)")
    idle = {name: [row[name]["device_idle"] for row in run["rounds"]] for name in CONTENDERS}
    print(
        f"  {'64 free streams':22s} {'tokens/s':>32s} {'ratio':>26s} {'ms/step':>9s} {'idle':>6s}"
    )
    for name, words in zip(CONTENDERS, ("alone", "+ 16 constrained", "+ 16 free"), strict=True):
        rate = shown(run["tokens_per_s"][name], ",.0f")
        ratio = shown(run["ratio"][name], ".3f") if name in run["ratio"] else ""
        figures = f"{statistics.median(steps[name]):9.3f} {statistics.median(idle[name]):6.1%}"
        print(f"  {words:22s} {rate:>32s} {ratio:>26s} {figures}")
    cost = {name: shown(row, ".1f") for name, row in run["us_per_token"].items()}
    print(f"  a constrained token adds {cost['constrained']} us, a free one {cost['free']} us")
    for where, row in (("beside 64", beside), ("alone", single)):
        chosen = ", ".join(f"{name} {row['chosen'][name]['median']:.1%}" for name in USED)
        steps_ = shown(row["steps_per_token"], ".2f")
        print(
            f"  constrained {where}: {steps_} steps/token; forced "
            f"{row['forced']['median']:.1%}; chosen {chosen}"
        )
    print(f"  16 constrained: {shown(beside['constrained_tokens_per_s'], ',.0f')} tokens/s")
    print(
        f"  one stream: {shown(single['constrained_ms'], '.2f')} ms/token, free "
        f"{shown(single['free_ms'], '.2f')}, ratio {shown(single['ratio'], '.2f')}"
    )
    print(
        f"  a mask: p50 {shown(beside['mask_us_p50'], '.0f')} us, p99 "
        f"{shown(beside['mask_us_p99'], '.0f')} us; a schema's first use "
        f"{run['first_grammars_ms']:.1f} ms",
        flush=True,
    )
    answers = run["answers"]
    print(f"  answers: {answers['complete']} complete, {answers['cut']} cut at {MAX_TOKENS} tokens")


def rounded(value: Any) -> Any:
    """The same with five digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", choices=("demo", *MODELS), default="demo")
    parser.add_argument("--device", default="simulated:5")
    parser.add_argument("--vocabulary", type=int, default=0, help="for a simulated demo")
    parser.add_argument("--context", type=int, default=PROMPT, help="of the free streams at first")
    parser.add_argument("--modes", nargs="+", default=["2-eager", "2-late", "1-eager"])
    parser.add_argument("--max-pipeline-depth", type=int, help="while steps are short")
    parser.add_argument("--jump-forward", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=300, help="of each free stream, in a window")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    simulated = args.device.startswith("simulated")
    if args.vocabulary and (args.model != "demo" or not simulated):
        parser.error("--vocabulary is for the demo on a simulated device: its weights have 2,048")
    for mode in args.modes:
        mode_of(mode)
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(args, Path(directory))
        for mode in args.modes:
            runs.append(uvloop.run(measure(model, args, mode)))
            show(runs[-1])
    names = ("llguidance", "tokenizers", "numpy", "uvloop")
    report: dict[str, Any] = {
        "question": "what do constrained answers cost, and what do they cost others?",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", "bench/structured_outputs.py", *arguments()]),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "versions": {
            "nanoactor": nanoactor.__version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in names},
        },
    }
    if not simulated:
        import torch

        report["versions"]["torch"] = importlib.metadata.version("torch")
        if args.device.startswith("cuda"):
            report["machine"] += ", " + torch.cuda.get_device_name()
    if args.out:
        args.out.write_text(json.dumps(rounded(report | {"runs": runs}), indent=1) + "\n")


if __name__ == "__main__":
    main()
