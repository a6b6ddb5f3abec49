"""The engine on a GPU: nano-vllm's workload, latency, decode steps, prefill, and what is left idle.

    python bench/gpu.py --model 0.6b|8b|30b-a3b[-fp8] [--tests workload,latency,decode,prefill]
                        [--depth 1 2] [--rounds 3] [--count-experts] [--out FILE] [--trace FILE]

Random weights of the true configurations in bfloat16, prompts of random token ids, no tokenizer.
workload: 256 prompts of 100 to 1,024 tokens, 100 to 1,024 tokens each, temperature 0.6. latency:
one prompt of 512 tokens on an idle engine, 1 and 256 tokens. decode: prompts of 1,024 tokens, the
time per step from two lengths of output; and in a window of full batches, what the device idled by
its own clock (idle: that alone). recommended: top-k 20, top-p 0.95, temperature 0.6, and greedy.
prefill: 8 prompts of 8,192 tokens (raise --max-model-len), prompts: 16 of 4,000. burst: 256 prompts
of 560 tokens at once, one token each; and 256 of 32 tokens. gap: the largest gap between two tokens
of 63 streams while a prompt of 32,768 tokens is prefilled (raise it too; its chunks are as large as
--max-num-batched-tokens). Every prompt is new, so nothing is cached. `--count-experts` then loads
the model again and counts the distinct experts that the rows of decode and idle have chosen.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
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

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

import nanoactor
from nanoactor import AsyncLLM, RequestOutputKind, SamplingParams

_SHARED = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "max_window_layers": 28,
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}
MODELS = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
        **_SHARED,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
        **_SHARED,
    },
    "30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
        **_SHARED,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELS |= {f"{name}-fp8": {**MODELS[name], "quantization_config": FP8} for name in [*MODELS]}
TESTS = ("workload", "latency", "decode", "idle", "recommended", "prefill", "prompts", "burst")
TESTS += ("gap",)
_COUNTED_TOKENS = 130
"""Number of answer tokens at the step of a window whose experts are counted."""


def prompts_of(lengths: list[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(0, 10000) for _ in range(length)] for length in lengths]


def workload_lengths() -> tuple[list[int], list[int]]:
    """Those of nano-vllm's benchmark."""
    rng = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(rng.randint(100, 1024))
        for _ in range(prompts[-1]):
            rng.randint(0, 10000)
    return prompts, [rng.randint(100, 1024) for _ in range(256)]


def params_of(tokens: int, temperature: float, seed: int) -> SamplingParams:
    return SamplingParams.for_model(
        temperature=temperature,
        max_tokens=tokens,
        ignore_eos=True,
        seed=seed,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class Bench:
    """One engine."""

    def __init__(self, llm: AsyncLLM, args: argparse.Namespace) -> None:
        self.llm, self.rounds, self.seed = llm, args.rounds, 1000
        self.large_rounds = args.rounds_256 or args.rounds
        self.cut: dict[str, float] = {}
        self.answered: list[tuple[list[int], list[int]]] = []
        """Prompts and answers of the last batch."""
        self.windows: dict[str, list[list[int]]] = {}
        """For each number of rows, the tokens of each row at one step of the last window."""

    async def one(self, prompt: list[int], tokens: int, temperature: float, seed: int) -> list[int]:
        params = dataclasses.replace(params_of(tokens, temperature, seed), **self.cut)
        async for output in self.llm.generate({"prompt_token_ids": prompt}, params):
            final = output
        return list(final.outputs[0].token_ids)

    async def generate(self, lengths: list[int], outputs: list[int], temperature: float) -> float:
        """Seconds until all are done."""
        self.seed += 1
        prompts = prompts_of(lengths, self.seed)
        begin = time.perf_counter()
        answers = await asyncio.gather(
            *(
                self.one(prompt, tokens, temperature, seed)
                for seed, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True))
            )
        )
        seconds = time.perf_counter() - begin
        assert [len(answer) for answer in answers] == outputs
        self.answered = list(zip(prompts, answers, strict=True))
        return seconds

    async def workload(self) -> dict:
        lengths, outputs = workload_lengths()
        await self.generate(lengths, outputs, 0.6)
        before = await self.device()
        times = [await self.generate(lengths, outputs, 0.6) for _ in range(self.rounds)]
        figures = self.between(before, await self.device())
        rates = [sum(outputs) / seconds for seconds in times]
        return {"output_tokens": sum(outputs), "tokens_per_s": rates, **figures}

    async def latency(self) -> dict:
        first, step = [], []
        for number in range(self.rounds + 3):
            one = await self.generate([512], [1], 0.0)
            many = await self.generate([512], [256], 0.0)
            if number:
                first.append(one * 1e3)
                step.append((many - one) / 255 * 1e3)
        return {"ttft_ms": first, "ms_per_token": step}

    async def decode(self, batches: list[int]) -> dict:
        results = {}
        for rows in batches:
            few, many = (128, 384) if rows <= 8 else (128, 256)
            await self.generate([1024] * rows, [8] * rows, 0.0)
            times = []
            for _ in range(self.rounds if rows < 256 else self.large_rounds):
                long = await self.generate([1024] * rows, [many] * rows, 0.0)
                short = await self.generate([1024] * rows, [few] * rows, 0.0)
                times.append((long - short) / (many - few) * 1e3)
            results[str(rows)] = {"ms_per_step": times, **await self.window(rows)}
            print(rows, json.dumps(results[str(rows)]), flush=True)
        return results

    async def window(self, rows: int, temperature: float = 0.0) -> dict:
        """A stretch in which all rows decode, by the device's own clock."""
        wanted = (await self.scheduler())["prefill_tokens"] + rows * 1024
        task = asyncio.ensure_future(self.generate([1024] * rows, [260] * rows, temperature))
        await self.until(lambda scheduler: scheduler["prefill_tokens"] >= wanted)
        planned = (await self.scheduler())["steps"]
        before = await self.device_after(planned + 2)
        after = await self.device_after(before["steps"] + 150)
        await task
        self.windows[str(rows)] = [
            prompt + answer[:_COUNTED_TOKENS] for prompt, answer in self.answered
        ]
        return self.between(before, after)

    async def scheduler(self) -> dict:
        return (await self.llm.statistics())["scheduler"]["actor"]

    async def until(self, reached: Callable[[dict], bool]) -> None:
        while not reached(await self.scheduler()):  # noqa: ASYNC110
            await asyncio.sleep(0.003)

    async def device_after(self, steps: int) -> dict:
        """The device's figures once so many steps are done."""
        while (now := await self.device())["steps"] < steps:  # noqa: ASYNC110
            await asyncio.sleep(0.003)
        return now

    async def device(self) -> dict:
        figures = await self.llm.statistics()
        runner = figures["runner.0"]
        nodes = {row["node"]["name"]: row["node"]["cpu_seconds"] for row in figures.values()}
        return {
            "busy": runner["actor"]["busy_seconds"],
            "idle": runner["actor"]["idle_seconds"],
            "steps": runner["actor"]["steps_done"],
            "cpu": sum(nodes.values()),
        }

    def between(self, before: dict, after: dict) -> dict:
        change = {name: after[name] - before[name] for name in before}
        steps = max(1, change["steps"])
        return {
            "device_idle_share": change["idle"] / (change["busy"] + change["idle"]),
            "device_ms_per_step": change["busy"] / steps * 1e3,
            "window_ms_per_step": (change["busy"] + change["idle"]) / steps * 1e3,
            "cpu_ms_per_step": change["cpu"] / steps * 1e3,
            "steps": change["steps"],
        }

    async def recommended(self) -> dict:
        """Steps of 64 rows with the sampling that Qwen3's authors recommend, and greedy ones."""
        self.cut = {"top_k": 20, "top_p": 0.95}
        cut = await self.window(64, 0.6)
        self.cut = {}
        return {"top_k_20_top_p_0.95": cut, "greedy": await self.window(64)}

    async def gap(self) -> dict:
        """63 running streams, and a prompt of 32,768 tokens: the largest gaps between tokens."""
        tokens, gaps, quiet = 1500, [], []
        start = asyncio.Event()

        async def stream(prompt: list[int], seed: int) -> None:
            params = dataclasses.replace(
                params_of(tokens, 0.0, seed), output_kind=RequestOutputKind.DELTA
            )
            before = None
            async for _ in self.llm.generate({"prompt_token_ids": prompt}, params):
                now = time.perf_counter()
                if before is not None:
                    (gaps if start.is_set() else quiet).append((now - before) * 1e3)
                before = now

        prompts = prompts_of([1024] * 63, 77)
        tasks = [asyncio.ensure_future(stream(p, n)) for n, p in enumerate(prompts)]
        await self.until(lambda scheduler: scheduler["running"] == 63)
        await asyncio.sleep(1.0)
        quiet.clear()
        await asyncio.sleep(1.0)
        start.set()
        await self.generate([32768], [1], 0.0)
        start.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return {
            "largest_gap_ms": max(gaps),
            "median_gap_ms": statistics.median(gaps),
            "median_gap_before_ms": statistics.median(quiet),
            "tokens_meanwhile": len(gaps),
        }

    async def prompts(self) -> dict:
        """Sixteen prompts of 4,000 tokens."""
        await self.generate([4000] * 16, [1] * 16, 0.0)
        times = [await self.generate([4000] * 16, [1] * 16, 0.0) for _ in range(self.rounds)]
        return {"tokens_per_s": [64000 / seconds for seconds in times]}

    async def burst(self) -> dict:
        results = {}
        for length in (560, 32):
            await self.generate([length] * 256, [1] * 256, 0.0)
            before = (await self.llm.statistics())["runner.0"]["actor"]
            times = [await self.generate([length] * 256, [1] * 256, 0.0) for _ in range(3)]
            after = (await self.llm.statistics())["runner.0"]["actor"]
            results[str(length)] = {
                "tokens_per_s": [256 * length / seconds for seconds in times],
                "steps": after["steps"] - before["steps"],
                "steps_by_operators": sum(
                    after[name] - before[name] for name in ("steps_uncaptured", "steps_too_large")
                ),
            }
        return results

    async def prefill(self) -> dict:
        await self.generate([8192] * 8, [1] * 8, 0.0)
        times = [await self.generate([8192] * 8, [1] * 8, 0.0) for _ in range(self.rounds)]
        return {"tokens_per_s": [65536 / seconds for seconds in times]}


async def measure(args: argparse.Namespace, directory: Path, depth: int) -> dict:
    begin = time.perf_counter()
    llm = AsyncLLM(
        str(directory),
        device=args.device,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_restarts=0,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        pipeline_depth=depth,
        enforce_eager=args.enforce_eager,
        plan_lead=args.plan_lead,
        decode_kernel=not args.no_decode_kernel,
        max_pipeline_depth=None if args.max_depth is None else max(depth, args.max_depth),
    )
    results = {"depth": depth}
    async with llm:
        results["start_s"] = time.perf_counter() - begin
        results["facts"] = llm.facts
        bench = Bench(llm, args)
        for test in args.tests.split(","):
            if test == "decode":
                results[test] = await bench.decode(args.batches)
            elif test == "idle":
                results["decode"] = {str(n): await bench.window(n) for n in args.batches}
                print(depth, "idle", json.dumps(results["decode"]), flush=True)
                continue
            else:
                results[test] = await getattr(bench, test)()
            print(depth, test, json.dumps(results[test]), flush=True)
        trace = await llm.trace()
        results["ledger"] = trace.summary().line
        if args.trace:
            trace.save(args.trace)
    if args.count_experts:
        count_experts(args, directory, bench.windows, results.get("decode", {}))
    return results


def count_experts(
    args: argparse.Namespace,
    directory: Path,
    windows: dict[str, list[list[int]]],
    results: dict[str, dict],
) -> None:
    """Add the numbers of distinct experts per layer to the results of each number of rows."""
    from bench.distinct_experts import ChoiceRecorder, distinct, summarize

    recorder = ChoiceRecorder(
        directory, args.max_model_len, device=args.device, load_format="dummy"
    )
    for rows, contexts in windows.items():
        counts = distinct([recorder.choices(context) for context in contexts])
        results[rows]["distinct_experts"] = summarize(counts)
        print(rows, "distinct experts", json.dumps(results[rows]["distinct_experts"]), flush=True)


def report(model: str, runs: list[dict], packages: tuple[str, ...], engine: str) -> dict:
    """Return the content of a results file."""
    import torch

    return {
        "question": "how fast is the engine on a GPU, and what is left idle?",
        "command": "python bench/" + Path(sys.argv[0]).name + " " + " ".join(arguments()),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "engine": engine,
        "model": model,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "runs": runs,
    }


def arguments() -> list[str]:
    """The command line without what only says where to put the results."""
    kept, given = [], iter(sys.argv[1:])
    for word in given:
        if word in ("--out", "--trace", "--image"):
            next(given)
        else:
            kept.append(word)
    return kept


def summary(results: dict) -> None:
    """The medians, a line each."""
    for run in results["runs"]:
        name = f"{results['engine']} {results['model']}"
        name += f" depth {run['depth']}" if "depth" in run else ""
        for test in ("workload", "prefill", "prompts"):
            if test in run:
                rate = statistics.median(run[test]["tokens_per_s"])
                print(f"{name} {test}: {rate:,.0f} tokens/s")
        if "latency" in run:
            first, step = (
                statistics.median(run["latency"][k]) for k in ("ttft_ms", "ms_per_token")
            )
            print(f"{name} latency: TTFT {first:.2f} ms, {step:.3f} ms per token")
        for rows, row in run.get("decode", {}).items():
            line = f"{name} decode {rows}:"
            if "ms_per_step" in row:
                line += f" {statistics.median(row['ms_per_step']):.3f} ms per step"
            if "device_idle_share" in row:
                line += f", by the device's clock {row['device_ms_per_step']:.3f}, "
                line += f"idle {row['device_idle_share']:.2%}"
            if "distinct_experts" in row:
                line += f", {row['distinct_experts']['mean']:.1f} distinct experts per layer"
            print(line)


def check_countable(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    tests = set(args.tests.split(","))
    if "num_experts" not in MODELS[args.model]:
        parser.error(f"--count-experts: {args.model} has no experts")
    if not tests & {"decode", "idle"} or "recommended" in tests:
        parser.error("--count-experts: needs decode or idle, without recommended")
    if len(args.depth) > 1:
        parser.error("--count-experts: the model of one depth would not leave room for the next")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tests", default=",".join(TESTS[:3]))
    parser.add_argument("--depth", type=int, nargs="+", default=[2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rounds-256", type=int, help="rounds of the largest batch")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--plan-lead", default="eager")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--max-depth", type=int, help="steps in flight while they are short")
    parser.add_argument("--no-decode-kernel", action="store_true")
    parser.add_argument("--count-experts", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    if args.count_experts:
        check_countable(parser, args)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(MODELS[args.model]))
        runs = [uvloop.run(measure(args, Path(name), depth)) for depth in args.depth]
    packages = ("torch", "triton", "transformers", "numpy")
    results = report(args.model, runs, packages, "nanoactor " + nanoactor.__version__)
    summary(results)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
