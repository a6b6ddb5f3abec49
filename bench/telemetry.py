"""What OpenTelemetry spans cost: the same requests with and without them, alternately.

    python bench/telemetry.py [--requests 512] [--at-once 64] [--tokens 16] [--rounds 9]

Two engines of one process on a simulated device with steps of 1 ms; the spans of one of them go to
a collector in a process of its own, which only answers. `--control` compares two engines without
spans: what differs then is noise. Printed are requests per second of the engine with spans divided
by those of the other, the CPU time that this process takes per request, and the CPU time of making
and queuing the spans of one request, which is what its event loop does.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from opentelemetry.sdk.version import __version__ as sdk_version

import nanoactor
from nanoactor import AsyncLLM, SamplingParams
from nanoactor.recovery.journal import Entry
from nanoactor.telemetry.exporting import Telemetry
from nanoactor.telemetry.origin import Origin

COLLECTOR = """
import http.server

class Collector(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
print(server.server_port, flush=True)
server.serve_forever()
"""
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
ALONE = 400
"""Requests whose spans are made without an engine; the queue has room for all of them."""


async def load(llm: AsyncLLM, args: argparse.Namespace) -> tuple[float, float]:
    """Run all requests; return requests per second and microseconds of CPU per request."""
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=0.0)
    left = iter(range(args.requests))

    async def reader() -> None:
        for number in left:
            prompt = {"prompt_token_ids": [number % 1000 + 3] * 32}
            async for _ in llm.generate(prompt, params):
                pass

    begin, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(reader() for _ in range(args.at_once)))
    seconds = time.perf_counter() - begin
    return args.requests / seconds, 1e6 * (time.process_time() - cpu) / args.requests


async def finished(llm: AsyncLLM) -> Entry:
    """Return the journal entry of a request that has ended."""
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    (request,) = llm.submit([{"prompt_token_ids": [3] * 32}], params)
    async for _ in request:
        pass
    return request._entry


def making(url: str, flags: str, entry: Entry) -> float:
    """Return the microseconds of CPU for the spans of one request, by this thread's clock."""
    telemetry = Telemetry(url, "demo", "embeddings")
    origin = Origin({"traceparent": PARENT + flags}, is_http=True, request_id="mine")
    note, begin = telemetry.noting(origin), time.thread_time()
    for _ in range(ALONE):
        note(entry)
    spent = time.thread_time() - begin
    telemetry.abandon()
    return 1e6 * spent / ALONE


async def measure(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Return the figures of all rounds."""
    options: dict[str, Any] = {"device": "simulated:1", "max_model_len": 512, "seed": 0}
    rounds: list[dict[str, tuple[float, float]]] = []
    async with (
        AsyncLLM("demo", **options) as without,
        AsyncLLM(
            "demo", **options, otlp_traces_endpoint=None if args.control else url
        ) as with_spans,
    ):
        engines = {"without": without, "with": with_spans}
        for llm in engines.values():
            await load(llm, args)  # warms up
        for number in range(args.rounds):
            order = list(engines) if number % 2 else list(engines)[::-1]
            rounds.append({name: await load(engines[name], args) for name in order})
        entry = await finished(without)
    ratios = [one["with"][0] / one["without"][0] for one in rounds]
    more = [one["with"][1] - one["without"][1] for one in rounds]
    made = {
        kind: [making(url, flags, entry) for _ in range(args.rounds)]
        for kind, flags in (("sampled", "01"), ("not_sampled", "00"))
    }
    return {
        "requests_per_s": {
            name: round(statistics.median(one[name][0] for one in rounds), 1) for name in engines
        },
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(one, 4) for one in ratios],
        "process_cpu_us_per_request": {
            name: round(statistics.median(one[name][1] for one in rounds), 1) for name in engines
        },
        "more_process_cpu_us_per_request": round(statistics.median(more), 1),
        "making_cpu_us_per_request": {
            kind: round(statistics.median(found), 1) for kind, found in made.items()
        },
    }


def main() -> None:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--control", action="store_true", help="neither engine makes spans")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = [sys.executable, "-c", COLLECTOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as collector:
        assert collector.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(collector.stdout.readline())}/v1/traces"
            figures = asyncio.run(measure(args, url))
        finally:
            collector.terminate()
    result = {
        "command": f"python bench/telemetry.py --requests {args.requests} --at-once {args.at_once} "
        f"--tokens {args.tokens} --rounds {args.rounds}{' --control' * args.control}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "nanoactor": nanoactor.__version__,
            "opentelemetry-sdk": sdk_version,
            "python": platform.python_version(),
        },
        **figures,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
