"""Routers on Ray, by what they have computed and how long they let clients wait.

    python bench/replicas_routing.py [--runs 5] [--hot 0] [--kill] [--routers ours default prefix]
        [--out FILE]

64 conversations of 8 turns share a system prompt of a quarter of their tokens; the cache of each of
three replicas holds a third of all. Steps of the simulated device take 5 ms and 20 us for each
token, so that a hit saves time. Told are the tokens of prompts that had to be computed, and the
time to the first token. `ours` is the router of `nanoactor serve --replicas`; `default` is Ray
Serve's, `prefix` is Ray's `PrefixCacheAffinityRouter`: both call the same engines, a stream for
each request. `--hot N`: one conversation is N clients' at once. `--kill`: a replica is killed after
a third of the time; the curve is by fifths of a run. Runs take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
sys.path.insert(0, str(Path(__file__).parent))

from replicas import ENGINES, model_directory, titled

from nanoactor import AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams

TURNS, SYSTEM, SAID, ANSWER = 8, 170, 32, 32
PLAIN = "bench-plain"


class PlainEngine:
    """An engine as most put it on Ray Serve: a stream for each request."""

    async def __init__(self, config: EngineConfig) -> None:
        self._llm = await AsyncLLM(config).start()

    async def generate(self, request: Any) -> AsyncGenerator[Any, None]:
        """Yield (ids, cached tokens, whether it is over)."""
        prompt = {"prompt_token_ids": request["ids"]}
        params = params_of(request["seed"])
        async for output in self._llm.generate(prompt, params):
            yield output.outputs[0].token_ids, output.num_cached_tokens, output.finished


class Asked(dict):  # type: ignore[type-arg]
    """Ray's router by prefixes reads characters."""

    @property
    def prompt(self) -> str:
        return " ".join(map(str, self["ids"]))


def params_of(seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=ANSWER, ignore_eos=True, seed=seed, output_kind=RequestOutputKind.DELTA
    )


@dataclasses.dataclass
class Told:
    """One turn."""

    at: float
    first: float
    prompt: int
    cached: int


class Ours:
    """Through the fleet, in this process as in an ingress."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def ask(self, ids: list[int], seed: int) -> AsyncGenerator[Any, None]:
        async for output in self._llm.generate({"prompt_token_ids": ids}, params_of(seed)):
            yield output.outputs[0].token_ids, output.num_cached_tokens, output.finished


class Theirs:
    """Through a handle of Ray Serve's."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="generate", stream=True)

    async def ask(self, ids: list[int], seed: int) -> AsyncGenerator[Any, None]:
        async for item in self._handle.remote(Asked(ids=ids, seed=seed)):
            yield item


async def converse(
    way: Any, number: int, system: list[int], told: list[Told], begin: float
) -> None:
    """One client: its turns, with pauses."""
    draw = random.Random(number)
    ids = list(system)
    await asyncio.sleep(draw.uniform(0, 3))
    for turn in range(TURNS):
        ids += [draw.randrange(20, 500) for _ in range(SAID)]
        asked, first = time.monotonic(), 0.0
        answer: list[int] = []
        cached = 0
        async for tokens, hits, _ in way.ask(ids, 1000 * number + turn):
            first = first or time.monotonic()
            answer += tokens
            cached = hits or cached
        told.append(Told(asked - begin, first - asked, len(ids), cached))
        ids += answer
        await asyncio.sleep(draw.expovariate(1 / 0.5))


async def run(way: Any, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    system = [random.Random(seed).randrange(20, 500) for _ in range(SYSTEM)]
    told: list[Told] = []
    begin = time.monotonic()
    # A hot conversation: several clients say the same, a moment apart.
    numbers = [seed * 10_000 + at for at in range(args.conversations)]
    numbers += [numbers[0]] * args.hot
    work = [asyncio.ensure_future(converse(way, n, system, told, begin)) for n in numbers]
    if args.kill:
        await asyncio.sleep(4)
        os.kill(titled(ENGINES)[0], signal.SIGKILL)
    await asyncio.gather(*work)
    firsts = sorted(each.first for each in told)
    fifth = max(each.at for each in told) / 5 + 1e-9
    curve = []
    for part in range(5):
        mine = [each for each in told if int(each.at / fifth) == part]
        curve.append(
            {
                "computed_share": round(
                    sum(e.prompt - e.cached for e in mine) / max(1, sum(e.prompt for e in mine)), 3
                ),
                "p50_ms": round(1000 * statistics.median(e.first for e in mine), 1),
            }
        )
    return {
        "computed": sum(each.prompt - each.cached for each in told),
        "prompt_tokens": sum(each.prompt for each in told),
        "p50_ms": round(1000 * firsts[len(firsts) // 2], 1),
        "p99_ms": round(1000 * firsts[int(0.99 * len(firsts))], 1),
        "curve": curve,
    }


async def fleet_run(args: argparse.Namespace, config: EngineConfig, seed: int) -> dict[str, Any]:
    from nanoactor.fleet.client import FleetLLM
    from nanoactor.ray_serve.api import serve
    from nanoactor.ray_serve.connector import RayConnector
    from nanoactor.ray_serve.deployments import Engine
    from nanoactor.ray_serve.options import FleetConfig

    fleet = FleetConfig(replicas=args.replicas)
    from ray.serve.config import RequestRouterConfig

    deployed = serve.deployment(Engine).options(
        name="engines",
        num_replicas=args.replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,
        request_router_config=RequestRouterConfig(
            request_router_class="nanoactor.ray_serve.router:ReplicaNameRouter"
        ),
    )
    handle = await asyncio.to_thread(
        lambda: serve.run(deployed.bind(config, fleet), name="nanoactor", route_prefix=None)
    )
    llm = FleetLLM(config, RayConnector(handle))
    await llm.start()
    while len(llm.fleet.replicas) < args.replicas:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    try:
        return await run(Ours(llm), args, seed)
    finally:
        await llm.close()
        await asyncio.to_thread(serve.delete, "nanoactor")


async def plain_run(
    args: argparse.Namespace, config: EngineConfig, seed: int, router: str | None
) -> dict[str, Any]:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    options: dict[str, Any] = {}
    if router is not None:
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=router, request_router_kwargs={"imbalanced_threshold": 10}
        )
    deployed = serve.deployment(PlainEngine).options(
        name="engines",
        num_replicas=args.replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,
        **options,
    )
    handle = await asyncio.to_thread(
        lambda: serve.run(deployed.bind(config), name=PLAIN, route_prefix=None)
    )
    try:
        return await run(Theirs(handle), args, seed)
    finally:
        await asyncio.to_thread(serve.delete, PLAIN)


PREFIX = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter"
)


async def measure(args: argparse.Namespace, model: str) -> dict[str, Any]:
    blocks = args.blocks or (SYSTEM + args.conversations * TURNS * (SAID + ANSWER)) // 3 // 16
    config = EngineConfig(
        model,
        device="simulated:5+20",
        load_format="dummy",
        skip_tokenizer_init=True,
        prefix_salt=os.urandom(32),
        num_kv_blocks=blocks,
        max_model_len=2048,
        max_num_seqs=64,
    )
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.routers}
    for seed in range(args.runs):
        for name in args.routers:
            if name == "ours":
                one = await fleet_run(args, config, seed)
            else:
                one = await plain_run(args, config, seed, PREFIX if name == "prefix" else None)
            found[name].append(one)
            print(seed, name, {k: v for k, v in one.items() if k != "curve"}, flush=True)
    return {
        "blocks": blocks,
        "medians": {
            name: {
                key: statistics.median(one[key] for one in runs)
                for key in ("computed", "p50_ms", "p99_ms")
            }
            for name, runs in found.items()
        },
        "runs": found,
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hot", type=int, default=0)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--routers", nargs="+", default=["ours", "default", "prefix"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import ray
    from ray import serve

    ray.init(
        "local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    serve.start(proxy_location="Disabled")
    with tempfile.TemporaryDirectory() as directory:
        result = asyncio.run(measure(args, model_directory(Path(directory))))
    with contextlib.suppress(Exception):
        serve.shutdown()
    ray.shutdown()
    report = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "versions": {"ray": ray.__version__},
        **result,
    }
    print(json.dumps(report["medians"], indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
