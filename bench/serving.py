"""The server under load, and what it adds to the engine.

    python bench/serving.py [--model demo] [--device simulated:5] [--rates 5 10 20] [--rounds 3]
                            [--concurrencies 1 16 64] [load's options] [--out FILE] [--plot FILE]
    python bench/serving.py --beside [--concurrency 64] [--rounds 5] [...]

The first form starts `nanoactor serve` and runs load.py against it: closed loop at each of the
concurrencies, open loop at each of the rates. The second runs the same requests through `AsyncLLM`
in one process and over HTTP, alternating round by round, with the client in a process of its own:
how many tokens/s the server costs. Simulated devices have steps of a fixed length and compute
nothing. The prompts and outputs are nano-vllm's, 100 to 1,024 tokens each, unless said otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import aiohttp
import load
import uvloop

import nanoactor
from nanoactor import AsyncLLM, RequestOutputKind, SamplingParams
from nanoactor.model_files.files import DEMO, resolve_model

LAG = "nanoactor_event_loop_lag_seconds"


def model_directory(target: Path) -> str:
    """The demo model's tokenizer under a configuration that allows long outputs; no weights."""
    demo = resolve_model(DEMO)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, target / name)
    config = json.loads((demo / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return str(target)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("device", "max_num_seqs", "load_format")
    return {name: getattr(args, name) for name in names}


@contextlib.contextmanager
def served(args: argparse.Namespace, model: str) -> Iterator[str]:
    """A server of its own; its address."""
    options = [part for name, value in engine_options(args).items() for part in (name, value)]
    flags = [f"--{p.replace('_', '-')}" if at % 2 == 0 else str(p) for at, p in enumerate(options)]
    command = [sys.executable, "-m", "nanoactor", "serve", model, "--port", "0", *flags]
    command += ["--served-model-name", "model", "--no-access-log"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if found := re.search(r"listening on (http://\S+)", line):
                yield found[1]
                break
        else:
            raise SystemExit(f"the server did not start: {server.wait()}")
    finally:
        server.terminate()
        server.wait()
        server.stderr.close()


def over_http(args: argparse.Namespace, url: str, **changes: Any) -> dict[str, Any]:
    """One load from a process of its own; with what the server measured of itself meanwhile."""
    before = metrics(url)
    values = {**vars(args), **changes}
    command = [sys.executable, str(Path(load.__file__)), url, "--model", "model"]
    for name in ("rate", "concurrency", "requests", "vocabulary", "seed", "trace"):
        if values[name] is not None:
            command += [f"--{name}", str(values[name])]
    for name in ("prompt", "output"):
        command += [f"--{name}", *map(str, values[name])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures | {"loop_lag_p99_ms": lag_p99(before, metrics(url))}


def metrics(url: str) -> dict[str, float]:
    """The server's own figures."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def lag_p99(before: dict[str, float], after: dict[str, float]) -> float:
    """The upper bound, in ms, of the bucket in which 99 % of the lags between two looks end."""
    names = [name for name in after if name.startswith(f"{LAG}_bucket")]
    counts = {
        float(name.split('le="')[1].split('"')[0]): after[name] - before.get(name, 0.0)
        for name in names
    }
    total = max(counts.values())
    return 1000 * min(bound for bound, count in counts.items() if count >= 0.99 * total)


# -- in one process -----------------------------------------------------------------------


async def in_process(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """The same load through `AsyncLLM`."""
    async with AsyncLLM(model, **engine_options(args)) as llm:

        async def ask(wanted: load.Wanted, got: load.Got) -> None:
            params = SamplingParams.for_model(
                max_tokens=wanted.output, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            async for output in llm.generate({"prompt_token_ids": wanted.prompt}, params):
                got.arrivals.append(time.monotonic())
                got.tokens += len(output.outputs[0].token_ids)
                got.chunks += 1

        return await load.run(args, ask)


def beside(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Both, alternately."""
    rounds = []
    for number in range(args.rounds):
        engine = uvloop.run(in_process(args, model))
        with served(args, model) as url:
            http = over_http(args, url)
        ratio = http["output_tokens_per_second"] / engine["output_tokens_per_second"]
        rounds.append({"engine": engine, "http": http, "ratio": ratio})
        print(
            f"round {number + 1}: engine {engine['output_tokens_per_second']:,.0f} tokens/s, HTTP "
            f"{http['output_tokens_per_second']:,.0f}, ratio {ratio:.3f}; chunks per token "
            f"{engine['chunks_per_token']:.2f} and {http['chunks_per_token']:.2f}; loop lag p99 "
            f"<= {http['loop_lag_p99_ms']:g} ms; errors {http['errors']}",
            flush=True,
        )
    ratio = statistics.median(r["ratio"] for r in rounds)
    print(f"median ratio: {ratio:.3f}")
    return {"rounds": rounds, "median_ratio": ratio}


# -- curves -------------------------------------------------------------------------------


def curves(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Closed loop at each concurrency, open loop at each rate."""
    found = []
    with served(args, model) as url:
        for kind, values in (("concurrency", args.concurrencies), ("rate", args.rates)):
            for value in values:
                changes = {"concurrency": 0} | {kind: value}
                runs = [over_http(args, url, **changes) for _ in range(args.rounds)]
                middle = sorted(runs, key=lambda r: r["output_tokens_per_second"])[len(runs) // 2]
                found.append({"kind": kind, "value": value, **middle})
                print(row(found[-1]), flush=True)
    return {"runs": found}


def row(run: dict[str, Any]) -> str:
    def shown(name: str) -> str:
        return f"{name} " + "/".join(f"{value:.1f}" for value in run[name].values())

    times = "  ".join(shown(name) for name in ("ttft", "tpot", "gap", "e2e"))
    return (
        f"{run['kind']} {run['value']:>6g}  {run['output_tokens_per_second']:>8,.0f} tokens/s  "
        f"{times} ms (p50/p90/p99)  {run['chunks_per_token']:.2f} chunks/token  "
        f"lag p99 <= {run['loop_lag_p99_ms']:g} ms  {run['errors']} errors"
    )


def plot(runs: list[dict[str, Any]], path: str) -> None:
    """Latency against load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = [kind for kind in ("concurrency", "rate") if any(r["kind"] == kind for r in runs)]
    figure, axes = plt.subplots(len(kinds), 2, figsize=(9, 3.2 * len(kinds)), squeeze=False)
    for (left, right), kind in zip(axes, kinds, strict=True):
        chosen = [run for run in runs if run["kind"] == kind]
        values = [run["value"] for run in chosen]
        left.plot(values, [run["output_tokens_per_second"] for run in chosen], "o-")
        left.set_ylabel("output tokens/s")
        for name, colour in (("ttft", "tab:blue"), ("tpot", "tab:green")):
            for percentile, style in (("p50", "o-"), ("p99", "o--")):
                times = [run[name][percentile] for run in chosen]
                right.plot(values, times, style, color=colour, label=f"{name.upper()} {percentile}")
        right.set_ylim(bottom=0)
        right.set_ylabel("ms")
        right.legend(fontsize=8)
        label = {"concurrency": "streams at once", "rate": "requests/s (Poisson)"}[kind]
        for axis in (left, right):
            axis.set_xlabel(label)
            axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def device_name(device: str) -> str:
    """A GPU by its name."""
    if not device.startswith("cuda"):
        return device
    import torch

    return str(torch.cuda.get_device_name())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the demo's tokenizer, longer, without weights")
    parser.add_argument("--device", default="simulated:5")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--beside", action="store_true", help="compare with AsyncLLM in process")
    parser.add_argument("--rates", type=float, nargs="*", default=[5, 10, 20])
    parser.add_argument("--concurrencies", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--plot")
    load.add_options(parser)
    args = parser.parse_args()
    if args.beside and not args.concurrency:
        args.concurrency = 64
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or model_directory(Path(directory))
        found = beside(args, model) if args.beside else curves(args, model)
    if args.plot and not args.beside:
        plot(found["runs"], args.plot)
    if args.out:
        about = {
            "command": " ".join(["python", "bench/serving.py", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
            "nanoactor": nanoactor.__version__,
            "python": platform.python_version(),
            "aiohttp": aiohttp.__version__,
            "device": device_name(args.device),
            "cores": len(os.sched_getaffinity(0)),
        }
        Path(args.out).write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
