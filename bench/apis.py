"""The Responses and Messages APIs compared with chats: each streams the same answers in turn.

    python bench/apis.py [--streams 64] [--tokens 200] [--step 5] [--rounds 5] [--out FILE]

A server in a process of its own, on a simulated device with steps of so many milliseconds. By API:
output tokens per second of all streams together, the median time to the first event of a lone
stream, and the server's processor time per token (of the process that speaks HTTP).
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

import nanoactor

ASK = [{"role": "user", "content": "Speak, friend: who goes there?"}]
LONE = 20
"""Streams whose first event is timed, one after the other."""


def bodies(tokens: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the path and the body of each API."""
    common = {"model": "demo", "stream": True, "ignore_eos": True}
    return {
        "chat": ("/v1/chat/completions", {**common, "messages": ASK, "max_tokens": tokens}),
        "responses": ("/v1/responses", {**common, "input": ASK, "max_output_tokens": tokens}),
        "messages": ("/v1/messages", {**common, "messages": ASK, "max_tokens": tokens}),
    }


@contextmanager
def serving(step: float) -> Iterator[tuple[str, int]]:
    """Start a server; yield its URL and its process' id."""
    command = [sys.executable, "-m", "nanoactor", "serve", "demo", "--port", "0"]
    command += ["--device", f"simulated:{step:g}", "--no-access-log"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"listening on (http://\S+)", line):
                    yield found[1], process.pid
                    break
        finally:
            process.terminate()
            process.communicate()


async def stream(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> float:
    """Read one answer; return the seconds to its first event."""
    begin, first = time.perf_counter(), 0.0
    async with session.post(path, json=body) as answer:
        answer.raise_for_status()
        async for _ in answer.content.iter_any():
            first = first or time.perf_counter() - begin
    return first


def processor_seconds(pid: int) -> float:
    """Return what a process has used of the processor so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def measure(url: str, pid: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Take all APIs in turn, several times."""
    found: dict[str, dict[str, list[float]]] = {}
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        for number in range(options.rounds + 1):
            for name, (path, body) in bodies(options.tokens).items():
                figures = found.setdefault(name, {"rate": [], "first": [], "processor": []})
                begin, used = time.perf_counter(), processor_seconds(pid)
                await asyncio.gather(*(stream(session, path, body) for _ in range(options.streams)))
                seconds = time.perf_counter() - begin
                used = processor_seconds(pid) - used
                brief = {**body, "max_output_tokens" if "input" in body else "max_tokens": 2}
                firsts = [await stream(session, path, brief) for _ in range(LONE)]
                if number:  # the first round warms up
                    tokens = options.streams * options.tokens
                    figures["rate"].append(tokens / seconds)
                    figures["first"].append(1000 * statistics.median(firsts))
                    figures["processor"].append(1e6 * used / tokens)
    rows = []
    for name, figures in found.items():
        row: dict[str, Any] = {"api": name}
        row |= {key: round(statistics.median(values), 2) for key, values in figures.items()}
        rows.append(row)
    for row in rows:
        row["rate_ratio"] = round(row["rate"] / rows[0]["rate"], 3)
        row["first_ratio"] = round(row["first"] / rows[0]["first"], 3)
    return rows


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step", type=float, default=5.0, help="milliseconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with serving(options.step) as (url, pid):
        rows = asyncio.run(measure(url, pid, options))
    report = {
        "date": datetime.date.today().isoformat(),
        "command": f"python bench/apis.py --streams {options.streams} --tokens {options.tokens} "
        f"--step {options.step:g} --rounds {options.rounds}",
        "versions": {"nanoactor": nanoactor.__version__, "python": platform.python_version()},
        "units": {"rate": "tokens/s", "first": "ms", "processor": "us per token"},
        "rows": rows,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
