"""The pause of streams when a process dies: the time from its death to each stream's next token.

    python bench/recovery.py [--model demo|0.6b|8b] [--device auto] [--streams 16] [--context 256]
                             [--rounds 3] [--victims runner.0 control ...] [--bare | --vllm]
                             [--out FILE]

Streams run all at once; a process is killed once all have some tokens, and what each of them waits
is taken. `restart` is the part of it in which processes were replaced; the rest is the prefill of
all streams and the tokens' way. Then the next victim, in the same engine.

`--bare` compares instead, alternately, how long an idle engine takes to replace a process with how
long a Python of its own takes to import and set up the same actors.

`--vllm` kills vLLM's engine process instead, once, and says what its streams and a request behind
it came to. Needs vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import datetime
import json
import os
import pickle
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import nanoactor
from bench.gpu import MODELS, arguments
from nanoactor import AsyncLLM, SamplingParams
from nanoactor.placement.topology import LIGHT_ENVIRONMENT
from nanoactor.runtime.topology import ActorSpec

_FIRST = 8
"""Tokens that every stream has when somebody dies."""
_TOKENS = 400
_PATIENCE = 300.0


class Stream:
    """One request, and when its tokens came."""

    def __init__(self, llm: AsyncLLM, number: int, context: int) -> None:
        self.times: list[float] = []
        prompt = {"prompt_token_ids": [(7 * number + at) % 1000 + 3 for at in range(context)]}
        params = SamplingParams.for_model(max_tokens=_TOKENS, ignore_eos=True, seed=number)
        self.task = asyncio.ensure_future(self._read(llm, prompt, params))

    async def _read(self, llm: AsyncLLM, prompt: dict, params: SamplingParams) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            async for _ in llm.generate(prompt, params):
                self.times.append(time.monotonic())


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("nothing happened")
        await asyncio.sleep(0.0005)


async def pauses(llm: AsyncLLM, victim: str, streams: int, context: int) -> tuple[list, float]:
    """Seconds until the next token of each stream, and those of the restart."""
    running = [Stream(llm, number, context) for number in range(streams)]
    await until(lambda: min(len(stream.times) for stream in running) >= _FIRST)
    before = llm.restarts[1]
    at = time.monotonic()
    os.kill(llm.pids[victim], signal.SIGKILL)
    # What was on its way when it died still comes: a token counts once the engine has noticed.
    await until(lambda: llm.recovering is not None)
    known = [len(stream.times) for stream in running]
    found = []
    for stream, count in zip(running, known, strict=True):
        await until(lambda stream=stream, count=count: len(stream.times) > count)
        found.append(stream.times[count] - at)
    for stream in running:
        stream.task.cancel()
    await asyncio.gather(*(stream.task for stream in running))
    return found, llm.restarts[1] - before


async def measure(args: argparse.Namespace, model: str, options: dict) -> dict:
    results = {}
    llm = AsyncLLM(
        model,
        device=args.device,
        max_num_seqs=max(8, args.streams),
        max_restarts=10_000,
        restart_window=0.01,
        **options,
    )
    begin = time.monotonic()
    async with llm:
        started = time.monotonic() - begin
        for victim in args.victims or llm.pids:
            waits, restarts = [], []
            for _ in range(args.rounds):
                some, restart = await pauses(llm, victim, args.streams, args.context)
                waits += some
                restarts.append(restart)
            waits.sort()
            results[victim] = {
                "pause_p50_s": statistics.median(waits),
                "pause_p99_s": waits[min(len(waits) - 1, len(waits) * 99 // 100)],
                "restart_s": statistics.median(restarts),
            }
            print(victim, json.dumps(results[victim]), flush=True)
    return {"start_s": started, "victims": results}


_SET_UP = """
import pickle, sys
for spec in pickle.load(sys.stdin.buffer):
    spec.create().setup()
"""


async def bare_start(specs: list[ActorSpec]) -> float:
    """Seconds in which a new process sets these actors up."""
    begin = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _SET_UP,
        stdin=asyncio.subprocess.PIPE,
        env=os.environ | LIGHT_ENVIRONMENT,
    )
    await process.communicate(pickle.dumps(specs))
    if process.returncode:
        raise RuntimeError(f"{specs[0].name} cannot be set up: status {process.returncode}")
    return time.monotonic() - begin


async def replaced(llm: AsyncLLM, victim: str) -> float:
    """Seconds in which an idle engine replaces a process."""
    before = llm.restarts[1]
    os.kill(llm.pids[victim], signal.SIGKILL)
    await until(lambda: llm.recovering is not None)
    await until(lambda: llm.recovering is None)
    return llm.restarts[1] - before


async def compare_with_bare(args: argparse.Namespace, model: str, options: dict) -> dict:
    """In turns; the ratio is that of the medians."""
    results = {}
    async with AsyncLLM(
        model, device=args.device, max_restarts=10_000, restart_window=0.01, **options
    ) as llm:
        topology = llm._system._nodes.topology
        nodes = {node.name: node.actors for node in topology.nodes}
        for victim in args.victims or llm.pids:
            specs = [spec for spec in topology.actors if spec.name in nodes[victim]]
            pairs = []
            for _ in range(args.rounds):
                pairs.append((await bare_start(specs), await replaced(llm, victim)))
            bare, restart = (statistics.median(side) for side in zip(*pairs, strict=True))
            results[victim] = {"bare_s": bare, "replaced_s": restart, "ratio": restart / bare}
            print(victim, json.dumps(results[victim]), flush=True)
    return {"victims": results}


async def kill_peer(args: argparse.Namespace, directory: str) -> dict:
    """Kill the engine process of vLLM; return what its clients see."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM as Peer

    begin = time.monotonic()
    options = AsyncEngineArgs(
        model=directory, load_format="dummy", skip_tokenizer_init=True, disable_log_stats=True
    )
    peer = Peer.from_engine_args(options)
    started = time.monotonic() - begin
    params = vllm.SamplingParams.for_model(max_tokens=_TOKENS, ignore_eos=True, detokenize=False)
    counts: dict[int, int] = {}

    async def read(number: int) -> tuple[str, float]:
        prompt = {"prompt_token_ids": [(7 * number + at) % 1000 + 3 for at in range(args.context)]}
        try:
            async for _ in peer.generate(prompt, params, request_id=str(number)):
                counts[number] = counts.get(number, 0) + 1
        except Exception as error:
            return type(error).__name__, time.monotonic()
        return "whole", time.monotonic()

    streams = [asyncio.ensure_future(read(number)) for number in range(args.streams)]
    await until(lambda: len(counts) == args.streams and min(counts.values()) >= _FIRST)
    engines = [pid for pid in descendants(os.getpid()) if "EngineCore" in name_of(pid)]
    at = time.monotonic()
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    ends = await asyncio.wait_for(asyncio.gather(*streams), 120)
    outcomes = collections.Counter(how for how, _ in ends)
    try:
        behind, _ = await asyncio.wait_for(read(args.streams), 60)
    except TimeoutError:
        behind = "no answer in a minute"
    peer.shutdown()
    return {
        "engine": f"vLLM {vllm.__version__}",
        "start_s": started,
        "killed": len(engines),
        "streams_end_as": dict(outcomes),
        "told_within_s": max(when for _, when in ends) - at,
        "next_request": behind,
    }


def descendants(pid: int) -> list[int]:
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listed.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def name_of(pid: int) -> str:
    """The command line, or what the process calls itself."""
    where = Path(f"/proc/{pid}")
    return (where / "cmdline").read_text() + (where / "comm").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=["demo", *MODELS], default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--victims", nargs="+")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--bare", action="store_true")
    instead.add_argument("--vllm", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model, options = "demo", {}
        if args.model != "demo":
            (Path(name) / "config.json").write_text(json.dumps(MODELS[args.model]))
            model, options = name, {"load_format": "dummy", "skip_tokenizer_init": True}
        if args.vllm:
            run = kill_peer(args, model)
        else:
            run = (compare_with_bare if args.bare else measure)(args, model, options)
        found = asyncio.run(run)
    print(json.dumps(found))
    results = {
        "question": "how long do streams pause when a process dies?",
        "command": "python bench/recovery.py " + " ".join(arguments()),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "nanoactor": nanoactor.__version__},
        "cores": len(os.sched_getaffinity(0)),
        **found,
    }
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
