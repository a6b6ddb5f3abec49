"""Output tokens per second on the CPU, compared with Hugging Face transformers in the same run.

    python bench/throughput.py [--model demo|93m|0.6b] [--peer transformers] [--requests 64]
                               [--streams 1 32] [--length 200] [--rounds 1] [--out FILE]

The demo model, a Qwen3 of 93 million parameters, or Qwen3-0.6B's true configuration (both with
seeded random weights). By default: requests with prompts and outputs of 32 to 256 tokens, greedy,
end-of-sequence ignored. Both sides have all cores. transformers runs
`generate` on static batches: requests sorted by output length and left-padded, the best of several
batch sizes; and its continuous batching, `generate_batch`, where that runs on a CPU. Only tokens
that were asked for count.

With --streams: so many equal requests at once (a prompt of 100 tokens, --length of output), and
`generate` on a batch of the same, alternately, with its faster number of threads; and a decode
step's time compared with that of reading the weights once (`read_ms`: a sum over as many bytes,
with all cores).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

import nanoactor
from nanoactor import AsyncLLM, RequestOutputKind, SamplingParams

CONFIG = {
    "hidden_size": 768,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2304,
    "vocab_size": 32_000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "demo": None,
    "93m": CONFIG,
    "0.6b": {
        **CONFIG,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
    },
}
DTYPES = ("float32", "bfloat16")
BATCHES = (8, 16, 32)
PROMPT = 100


def make_checkpoint(name: str, directory: str) -> tuple[str, int]:
    """Return where the model is, and how many parameters it has; makes random weights for it."""
    if MODELS[name] is None:
        directory = str(Path(nanoactor.__file__).parent / "models" / name)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    else:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**MODELS[name]))
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(directory)
    return directory, sum(parameter.numel() for parameter in model.parameters())


def make_requests(count: int) -> list[tuple[list[int], int]]:
    """(prompt, output length) of each."""
    rng = random.Random(0)
    requests = []
    for _ in range(count):
        prompt = [rng.randrange(3, CONFIG["vocab_size"]) for _ in range(rng.randint(32, 256))]
        requests.append((prompt, rng.randint(32, 256)))
    return requests


# -- ours ---------------------------------------------------------------------------------


async def nanoactor_rate(directory: str, requests: list, dtype: str) -> dict:
    async def one(llm: AsyncLLM, prompt: list[int], length: int) -> int:
        params = SamplingParams.for_model(
            temperature=0,
            max_tokens=length,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in llm.generate({"prompt_token_ids": prompt}, params):
            final = output
        return len(final.outputs[0].token_ids)

    options = {"dtype": dtype, "skip_tokenizer_init": True, "max_num_seqs": 64, "max_restarts": 0}
    async with AsyncLLM(directory, **options) as llm:
        await asyncio.gather(*(one(llm, prompt[:8], 4) for prompt, _ in requests[:4]))
        begin = time.perf_counter()
        tokens = await asyncio.gather(*(one(llm, *request) for request in requests))
        seconds = time.perf_counter() - begin
        summary = (await llm.trace()).summary()
    return {"tokens_per_s": round(sum(tokens) / seconds, 1), "ledger": summary.line}


# -- transformers, in a process of its own ------------------------------------------------


def load(directory: str, dtype: str) -> transformers.PreTrainedModel:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


def static_rate(directory: str, requests: list, dtype: str, batch: int) -> float:
    model = load(directory, dtype)
    ordered = sorted(requests, key=lambda request: request[1])
    batches = [ordered[at : at + batch] for at in range(0, len(ordered), batch)]
    generate(model, [(prompt[:8], 4) for prompt, _ in ordered[:4]])
    begin = time.perf_counter()
    for rows in batches:
        generate(model, rows)
    return sum(length for _, length in requests) / (time.perf_counter() - begin)


@torch.inference_mode()
def generate(model: transformers.PreTrainedModel, rows: list) -> None:
    longest = max(len(prompt) for prompt, _ in rows)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in rows])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in rows])
    length = max(length for _, length in rows)
    made = model.generate(
        ids, attention_mask=mask, max_new_tokens=length, do_sample=False, pad_token_id=0
    )
    assert made.shape[1] == longest + length


def continuous_rate(directory: str, requests: list, dtype: str) -> float:
    """`generate_batch` takes one output length for all: requests of like length go together."""
    model = load(directory, dtype)
    begin = time.perf_counter()
    ordered = sorted(requests, key=lambda request: request[1])
    for at in range(0, len(ordered), 32):
        rows = ordered[at : at + 32]
        config = transformers.GenerationConfig(
            max_new_tokens=max(length for _, length in rows),
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        made = model.generate_batch([p for p, _ in rows], generation_config=config)
        assert len(made) == len(rows), "generate_batch lost requests"
    return sum(length for _, length in requests) / (time.perf_counter() - begin)


def in_a_process(function: str, *arguments, timeout: float) -> float | str:
    """tokens/s, or why there are none."""
    command = [sys.executable, __file__, "--part", json.dumps([function, *arguments])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"gave up after {timeout:.0f} s"
    if done.returncode:
        return done.stderr.strip().splitlines()[-1][:300]
    return round(float(done.stdout.strip().splitlines()[-1]), 1)


# -- equal streams ------------------------------------------------------------------------


async def stream_rate(directory: str, streams: int, dtype: str, length: int) -> tuple[float, float]:
    """(output tokens per second of so many equal requests, milliseconds of a decode step)."""
    params = SamplingParams.for_model(
        temperature=0,
        max_tokens=length,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def one(llm: AsyncLLM, number: int, tokens: int) -> None:
        prompt = {"prompt_token_ids": [3 + (number + at) % 1000 for at in range(PROMPT)]}
        async for _ in llm.generate(prompt, dataclasses.replace(params, max_tokens=tokens)):
            pass

    options = {"dtype": dtype, "skip_tokenizer_init": True, "max_model_len": 1024}
    options["max_restarts"] = 0
    async with AsyncLLM(directory, max_num_seqs=max(8, streams), **options) as llm:
        await asyncio.gather(*(one(llm, 500 + number, 12) for number in range(streams)))
        begin = time.perf_counter()
        await asyncio.gather(*(one(llm, number, length) for number in range(streams)))
        seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        await asyncio.gather(*(one(llm, 250 + number, 1) for number in range(streams)))
        prompts = time.perf_counter() - begin
    return streams * length / seconds, (seconds - prompts) / (length - 1) * 1e3


def generate_rate(directory: str, threads: int, dtype: str, streams: int, length: int) -> float:
    """Output tokens per second of `generate` on a batch of the same."""
    model = load(directory, dtype)
    torch.set_num_threads(threads)
    rows = [([3 + (row + at) % 1000 for at in range(PROMPT)], length) for row in range(streams)]
    generate(model, [(prompt, 8) for prompt, _ in rows])
    begin = time.perf_counter()
    generate(model, rows)
    return streams * length / (time.perf_counter() - begin)


def read_ms(size: int) -> float:
    """Milliseconds to read so many bytes of memory once, with all cores; the best of five."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    memory = torch.ones(size // 4)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        memory.sum()
        times.append((time.perf_counter() - begin) * 1e3)
    return round(min(times), 3)


def measure_streams(directory: str, parameters: int, args) -> dict:
    """Both alternately, for each type and number of streams."""
    found: dict = {}
    cores = len(os.sched_getaffinity(0))
    for dtype in DTYPES:
        size = parameters * getattr(torch, dtype).itemsize
        found[dtype] = {"weights_bytes": size}
        for streams in args.streams:
            row: dict = {"nanoactor": [], "step_ms": [], "read_ms": []}
            peers: dict = {1: [], cores: []}
            for _ in range(args.rounds):
                before = read_ms(size)
                wanted = directory, streams, dtype, args.length
                rate, step = asyncio.run(stream_rate(*wanted))
                row["nanoactor"].append(round(rate, 1))
                row["step_ms"].append(round(step, 3))
                row["read_ms"].append(min(before, read_ms(size)))
                for threads, rates in peers.items() if args.peer else ():
                    wanted = "generate", threads, dtype, streams, args.length, directory
                    rates.append(in_a_process(*wanted, timeout=900))
            row["step_over_read"] = round(
                statistics.median(
                    s / r for s, r in zip(row["step_ms"], row["read_ms"], strict=True)
                ),
                2,
            )
            if args.peer:
                row["transformers"] = peers
                middle = statistics.median(row["nanoactor"])
                peer = max(statistics.median(rates) for rates in peers.values())
                row["ratio"] = round(middle / peer, 2)
            found[dtype][str(streams)] = row
            print(dtype, streams, json.dumps(row), file=sys.stderr, flush=True)
    return found


# -- all of it ----------------------------------------------------------------------------


def cpu_flags() -> list[str]:
    text = Path("/proc/cpuinfo").read_text()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_vnni")
    return [flag for flag in wanted if flag in flags]


def measure(directory: str, args) -> dict:
    requests = make_requests(args.requests)
    found: dict = {"nanoactor": {}, "transformers static": {}, "transformers continuous": {}}
    for dtype in DTYPES:
        rounds = [asyncio.run(nanoactor_rate(directory, requests, dtype))]
        static = {batch: [] for batch in BATCHES}
        if args.peer:
            for _ in range(args.rounds):
                for batch in BATCHES:
                    rate = in_a_process("static", requests, dtype, batch, directory, timeout=900)
                    static[batch].append(rate)
                    print(f"transformers {dtype} batch {batch}: {rate}", file=sys.stderr)
                rounds.append(asyncio.run(nanoactor_rate(directory, requests, dtype)))
            found["transformers static"][dtype] = static
            rate = in_a_process("continuous", requests, dtype, 0, directory, timeout=600)
            found["transformers continuous"][dtype] = rate
        print(f"nanoactor {dtype}: {rounds}", file=sys.stderr, flush=True)
        found["nanoactor"][dtype] = rounds
    return found


def best(rates) -> float:
    return max((rate for rate in rates if isinstance(rate, float)), default=float("nan"))


def summarise(found: dict) -> dict:
    ours = {d: best(r["tokens_per_s"] for r in rows) for d, rows in found["nanoactor"].items()}
    static = found["transformers static"]
    theirs = {d: best(r for rates in static[d].values() for r in rates) for d in static}
    continuous = found["transformers continuous"]
    if not theirs:
        return {"nanoactor": ours}
    return {
        "nanoactor": ours,
        "transformers, best static batch": theirs,
        "float32, ratio": round(ours["float32"] / theirs["float32"], 2),
        "best type, ratio": round(max(ours.values()) / max(theirs.values()), 2),
        "ratio to continuous batching": {
            d: round(ours[d] / rate, 2) if isinstance(rate, float) else rate
            for d, rate in continuous.items()
        },
    }


def part(arguments: list) -> None:
    if arguments[0] == "generate":
        _, threads, dtype, streams, length, directory = arguments
        print(generate_rate(directory, threads, dtype, streams, length))
        return
    function, requests, dtype, batch, directory = arguments
    if function == "static":
        print(static_rate(directory, requests, dtype, batch))
    else:
        print(continuous_rate(directory, requests, dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="93m")
    parser.add_argument("--peer", choices=["transformers"])
    parser.add_argument("--streams", type=int, nargs="+")
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", help="for the processes that this one starts")
    args = parser.parse_args()
    if args.part:
        part(json.loads(args.part))
        return
    with tempfile.TemporaryDirectory() as directory:
        directory, parameters = make_checkpoint(args.model, directory)
        if args.streams:
            found = measure_streams(directory, parameters, args)
        else:
            found = measure(directory, args)
    given = [word for word in sys.argv[1:] if word not in ("--out", str(args.out))]
    result = {
        "question": "how many output tokens per second does a CPU give, beside transformers?",
        "command": " ".join(["python", "bench/throughput.py", *given]),
        "model": args.model,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "nanoactor": nanoactor.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "cpu": {"cores": len(os.sched_getaffinity(0)), "flags": cpu_flags()},
        "threads": len(os.sched_getaffinity(0)),
        "parameters": parameters,
        "summary": {} if args.streams else summarise(found),
        "runs": found,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
