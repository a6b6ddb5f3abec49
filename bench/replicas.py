"""Several engines on Ray: what they give together, what that costs, and what a death costs.

    python bench/replicas.py scale [--step 100] [--replicas 1 2 4]
    python bench/replicas.py cpu [--step 20] [--streams 1 16 256] [--rounds 3]
    python bench/replicas.py pause [--step 20] [--rounds 3]
    python bench/replicas.py rollout
    python bench/replicas.py soak [--minutes 45]
    python bench/replicas.py gpu [--model DIRECTORY] [--rounds 3]
    (each with [--out FILE])

`scale`: output tokens per second of 16 streams a replica, on three local nodes. `cpu`: processor
time per token of ingress and replica, compared with that of one engine's own server, both without
what they take when idle. `pause`: the longest gap between two events of 16 streams, undisturbed and
when their replica is killed or stopped. `rollout`: ten rounds of a new version with a different
number of replicas, two ingresses, under 16 clients: answers that were cut. `soak`: mixed traffic,
for its first half with a kill every 15 s; memory, descriptors and processes. `gpu`: one replica
behind its ingress compared with `nanoactor serve`, alternately. Simulated devices take so many
milliseconds a step and compute nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

import nanoactor
from nanoactor.model_files.files import DEMO, resolve_model

ENGINES, INGRESS = "ray::ServeReplica:nanoactor:engines", "ray::ServeReplica:nanoactor:ingress"


def model_directory(target: Path) -> str:
    """The demo model's tokenizer under a configuration that allows long outputs; no weights."""
    demo = resolve_model(DEMO)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, target / name)
    config = json.loads((demo / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    return str(target)


class Server:
    """`nanoactor serve` in a process of its own."""

    def __init__(self, model: str, *options: str, **environment: str) -> None:
        command = [sys.executable, "-m", "nanoactor", "serve", model, "--port", "0"]
        command += ["--load-format", "dummy", "--no-access-log", *options]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.url, self.lines, listening = "", [], threading.Event()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.lines.append(line.rstrip())
                if found := re.search(r"listening on (http://\S+)", line):
                    self.url = found[1]
                    listening.set()
            listening.set()

        threading.Thread(target=read, daemon=True).start()
        listening.wait(300)
        if not self.url:
            raise SystemExit("\n".join(self.lines))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def replicas(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/health"))["actors"]
        return found

    def until(self, count: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                if len(self.replicas()) == count:
                    return
            time.sleep(0.2)

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").splitlines()
        of = [line for line in lines if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rpartition(" ")[2]) for line in of)


@contextlib.contextmanager
def serving(model: str, *options: str, **environment: str) -> Iterator[Server]:
    server = Server(model, *options, **environment)
    try:
        yield server
    finally:
        server.stop()


def titled(title: str) -> list[int]:
    """Processes that call themselves so."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().decode().startswith(title):
                found.append(int(pid))
    return found


def cpu_seconds(pids: list[int]) -> float:
    """Processor time of processes' threads, without their children."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return 1e-9 * total


class Stream:
    """One stream: when its events came."""

    def __init__(self, number: int) -> None:
        self.number, self.times, self.tokens, self.error = number, [time.monotonic()], 0, ""

    async def run(self, session: aiohttp.ClientSession, url: str, tokens: int) -> None:
        body = {
            "model": "served",
            "prompt": [50 + self.number % 200] + [at % 400 + 20 for at in range(31)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "seed": self.number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with session.post(url + "/v1/completions", json=body) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                self.times.append(time.monotonic())
                if b'"usage":{' in line:
                    self.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                if b'"error":{' in line:
                    self.error = line.decode()


def run_streams(url: str, count: int, tokens: int) -> list[Stream]:
    async def main() -> list[Stream]:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        streams = [Stream(number) for number in range(count)]
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(stream.run(session, url, tokens) for stream in streams))
        return streams

    return asyncio.run(main())


def check(streams: list[Stream], tokens: int) -> None:
    wrong = [stream for stream in streams if stream.error or stream.tokens != tokens]
    if wrong:
        raise SystemExit(f"{len(wrong)} streams are not complete: {wrong[0].error}")


def common(step: float, *more: str) -> tuple[str, ...]:
    return ("--served-model-name", "served", "--device", f"simulated:{step:g}", *more)


# -- questions -------------------------------------------------------------------------------------


def scale(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of 1, 2 and 4 replicas, on three local nodes."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from ray.cluster_utils import Cluster

    rows = []
    tokens = round(args.seconds * 1000 / args.step)
    for replicas in args.replicas:
        nodes = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
        )
        for _ in range(2):
            nodes.add_node(num_cpus=2)
        options = ("--ray-address", nodes.address, "--ingresses", "1", "--max-num-seqs", "32")
        count = ("--replicas", str(replicas))
        try:
            with serving(model, *common(args.step), *count, *options) as server:
                server.until(replicas)
                check(run_streams(server.url, 16 * replicas, 20), 20)
                ingress, begin = titled(INGRESS), time.monotonic()
                before = cpu_seconds(ingress)
                streams = run_streams(server.url, 16 * replicas, tokens)
                seconds, busy = time.monotonic() - begin, cpu_seconds(ingress) - before
                check(streams, tokens)
                rate = sum(stream.tokens for stream in streams) / seconds
                rows.append(
                    {
                        "replicas": replicas,
                        "tokens_per_s": round(rate, 1),
                        "ingress_core": round(busy / seconds, 3),
                    }
                )
        finally:
            nodes.shutdown()
    for row in rows:
        row["ratio"] = round(row["tokens_per_s"] / rows[0]["tokens_per_s"], 3)
        print(row, flush=True)
    return {"step_ms": args.step, "rows": rows}


def cpu(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Processor time per token: one engine's own server, then ingress and replica."""
    rows = []
    tokens = max(20, round(args.seconds * 1000 / args.step))
    for streams in args.streams:
        found: dict[str, list[float]] = {"alone": [], "fleet": []}
        for _ in range(args.rounds):
            for name, more in (("alone", ()), ("fleet", ("--replicas", "1"))):
                options = common(args.step, "--max-num-seqs", "256", *more)
                with serving(model, *options) as server:
                    pids = [server.process.pid]
                    if more:
                        server.until(1)
                        pids = titled(INGRESS) + titled(ENGINES)
                    check(run_streams(server.url, streams, 20), 20)
                    time.sleep(3)
                    begin, before = time.monotonic(), cpu_seconds(pids)
                    check(run_streams(server.url, streams, tokens), tokens)
                    busy, seconds = cpu_seconds(pids) - before, time.monotonic() - begin
                    before = cpu_seconds(pids)
                    time.sleep(seconds)
                    busy -= cpu_seconds(pids) - before  # what they take without any stream
                    found[name].append(1e6 * busy / (streams * tokens))
        row: dict[str, Any] = {"streams": streams}
        row |= {f"{name}_us": round(statistics.median(each), 1) for name, each in found.items()}
        row["ratio"] = round(row["fleet_us"] / row["alone_us"], 2)
        rows.append(row)
        print(row, flush=True)
    return {"step_ms": args.step, "rows": rows}


def pause(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """The longest gap of any of 16 streams."""
    tokens = round(args.seconds * 1000 / args.step)
    rows = []
    with serving(model, *common(args.step), "--replicas", "2") as server:
        for number in (None, signal.SIGKILL, signal.SIGSTOP):
            gaps = []
            for _ in range(args.rounds):
                server.until(2)
                killer = threading.Timer(args.seconds / 3, lambda n=number: kill(server, n))
                killer.start()
                streams = run_streams(server.url, 16, tokens)
                killer.join()
                check(streams, tokens)
                firsts = [stream.times[1:] for stream in streams]
                gaps.append(max(b - a for times in firsts for a, b in itertools.pairwise(times)))
            what = "undisturbed" if number is None else signal.Signals(number).name
            rows.append({"what": what, "longest_gap_s": [round(gap, 2) for gap in gaps]})
            print(rows[-1], flush=True)
    return {"step_ms": args.step, "rows": rows}


def kill(server: Server, number: int | None) -> None:
    busy = [one["pid"] for one in server.replicas().values() if one["streams"]]
    if number is not None and busy:
        os.kill(busy[0], number)


def soak(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Mixed traffic; kills in the first half; what grows."""
    end = time.monotonic() + 60 * args.minutes
    half, draw, looks, answers = time.monotonic() + 30 * args.minutes, random.Random(1), [], [0, 0]
    with serving(model, *common(5), "--replicas", "2", "--silence-timeout", "3") as server:
        server.until(2)

        def load() -> None:
            while time.monotonic() < end:
                count, tokens = draw.choice(((1, 400), (16, 100), (64, 40), (8, 200)))
                streams = run_streams(server.url, count, tokens)
                answers[0] += len(streams)
                answers[1] += sum(s.tokens != tokens or bool(s.error) for s in streams)

        loader = threading.Thread(target=load)
        loader.start()
        kills, due = 0, time.monotonic() + 15
        while loader.is_alive():
            time.sleep(1)
            now = time.monotonic()
            if now < half and now > due and not server.metric("nanoactor_replica_reserved"):
                due = now + 15
                kill(server, (signal.SIGKILL, signal.SIGSTOP)[kills % 2])
                kills += 1
            if len(looks) < (now - (end - 60 * args.minutes)) // 30:
                looks.append(look(server))
                print(round(60 * args.minutes - (end - now)), looks[-1], answers, flush=True)
        result = {
            "kills": kills,
            "answers": answers[0],
            "wrong": answers[1],
            "looks": looks,
            **{
                name: server.metric(f"nanoactor_fleet_{name}_total")
                for name in ("moved", "requeued", "lost", "deaths", "poisoned")
            },
        }
    time.sleep(5)
    left = [title for title in ("ray::", "raylet") if titled(title)]
    return {**result, "left": left, "exit": server.process.returncode}


def rollout(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Ten rounds of a new version with a different number of replicas, under 16 clients."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from nanoactor import EngineConfig
    from nanoactor.ray_serve.application import build
    from nanoactor.ray_serve.options import FleetConfig
    from nanoactor.server.config import ServerConfig

    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
    )
    nodes.add_node(num_cpus=4)
    ray.init(nodes.address, log_to_driver=False, logging_level="error")
    serve.start(proxy_location="Disabled")
    config = EngineConfig(
        model, device="simulated:10", load_format="dummy", prefix_salt=os.urandom(32)
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = ServerConfig(port=port, served_model_name="served", access_log=False)
    url = f"http://127.0.0.1:{port}"

    def deploy(replicas: int) -> None:
        fleet = FleetConfig(replicas=replicas, ingresses=2)
        serve.run(build(config, server, fleet), name="nanoactor", route_prefix=None)

    deploy(2)
    counts = {"answers": 0, "cut": 0, "tried_again": 0}
    done = threading.Event()

    async def client(number: int) -> None:
        draw = random.Random(number)
        while not done.is_set():
            stream = Stream(draw.randrange(10_000))
            tokens = draw.choice((20, 100, 300))
            try:
                async with aiohttp.ClientSession() as session:  # a connection for each
                    await stream.run(session, url, tokens)
            except aiohttp.ClientError:
                counts["cut" if len(stream.times) > 1 else "tried_again"] += 1
                await asyncio.sleep(0.1)
                continue
            if len(stream.times) == 1:  # 503: the ingress is about to end
                counts["tried_again"] += 1
                await asyncio.sleep(0.1)
            else:
                counts["answers"] += 1
                counts["cut"] += stream.tokens != tokens or bool(stream.error)

    async def clients() -> None:
        await asyncio.gather(*(client(number) for number in range(16)))

    loader = threading.Thread(target=lambda: asyncio.run(clients()))
    loader.start()
    rounds = []
    for replicas in (3, 1, 2, 3, 2, 1, 3, 2, 1, 2):
        begin = time.monotonic()
        deploy(replicas)
        rounds.append({"replicas": replicas, "seconds": round(time.monotonic() - begin, 1)})
        print(rounds[-1], counts, flush=True)
        time.sleep(3)
    done.set()
    loader.join()
    serve.shutdown()
    ray.shutdown()
    nodes.shutdown()
    return {"rounds": rounds, **counts}


def look(server: Server) -> dict[str, float]:
    """Memory, descriptors and processes of ingress and family."""
    ingress = titled(INGRESS)[0]
    status = Path(f"/proc/{ingress}/status").read_text()
    resident = re.search(r"RssAnon:\s+(\d+)", status)
    assert resident is not None
    return {
        "ingress_mib": round(int(resident[1]) / 1024, 1),
        "ingress_descriptors": len(os.listdir(f"/proc/{ingress}/fd")),
        "ray_processes": len(titled("ray::")),
    }


def gpu(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """One replica on a GPU behind its ingress, alternating with the engine's own server."""
    rows: dict[str, list[float]] = {"alone": [], "fleet": []}
    mixed: dict[str, list[float]] = {"alone": [], "fleet": []}
    lone: dict[str, list[float]] = {"alone": [], "fleet": []}
    for _ in range(args.rounds):
        for name, more in (("alone", ()), ("fleet", ("--replicas", "1"))):
            options = ("--served-model-name", "served", "--device", "cuda", *more)
            options += ("--max-model-len", "2048", "--max-num-seqs", "128")
            with serving(model, *options, "--skip-tokenizer-init") as server:
                if more:
                    server.until(1)
                run_streams(server.url, 64, 64)
                for kept, count, tokens in ((rows, 64, 512), (lone, 1, 1024)):
                    begin = time.monotonic()
                    streams = run_streams(server.url, count, tokens)
                    check(streams, tokens)
                    kept[name].append(count * tokens / (time.monotonic() - begin))
                mixed[name].append(mixed_load(server.url))
                print(name, rows[name][-1], mixed[name][-1], lone[name][-1], flush=True)

    def told(found: dict[str, list[float]]) -> dict[str, float]:
        middle = {name: statistics.median(each) for name, each in found.items()}
        return {**middle, "ratio": round(middle["fleet"] / middle["alone"], 3)}

    return {"mixed": told(mixed), "64 equal streams": told(rows), "a lone stream": told(lone)}


def mixed_load(url: str) -> float:
    """Output tokens per second of load.py's mixture, 64 under way all the time."""
    script = str(Path(__file__).parent / "load.py")
    command = [sys.executable, script, url, "--model", "served", "--concurrency", "64"]
    command += ["--requests", "384", "--prompt", "100", "1024", "--output", "100", "1024"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(told)["output_tokens_per_second"])


QUESTIONS = {
    "scale": scale,
    "cpu": cpu,
    "pause": pause,
    "rollout": rollout,
    "soak": soak,
    "gpu": gpu,
}


def main() -> None:
    """Answer one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--step", type=float, default=20.0, help="milliseconds")
    parser.add_argument("--seconds", type=float, default=15.0, help="that streams take")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--model", help="for gpu: a directory")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or model_directory(Path(directory))
        result = QUESTIONS[args.question](model, args)
    report = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "versions": {"nanoactor": nanoactor.__version__, "python": platform.python_version()},
        "cores": os.cpu_count(),
        **result,
    }
    with contextlib.suppress(ImportError):
        import ray

        report["versions"]["ray"] = ray.__version__
    print(json.dumps(report, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
