"""What an Ascend NPU makes of everything that the engine asks of it, as one table.

    python -m tests.npu.smoke [--device npu:0] [--devices 2] [--quick] [--only NAME ...]
                              [--graph-mode MODE] [--output FILE.json] [--log FILE]

Each line is PASS, FAIL or SKIP (FIGURE: a measurement, judged by nobody), in Markdown, to be pasted
into an issue. Checks run in processes of their own: one that hangs or dies fails alone. The exit
status is 1 where something failed, and 2 where there is no NPU. --only takes parts of names.

--emulated runs the same on reference kernels on a CPU: it shows that this program runs, and says
nothing about an NPU.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
EMULATED = "EMULATED: says nothing about an NPU"
RUNTIME = "NANOACTOR_TEST_RUNTIME"
START_SECONDS = 300
STARTS = 2
"""How many processes in a row may fail to open the device before it is given up."""
_LONGEST = 240
_SECONDS_TO_DIE = 5


class Died(Exception):
    """A worker that will not answer any more."""


class Worker:
    """A process that carries out checks, one at a time."""

    def __init__(self, args: argparse.Namespace, scratch: Path, log: IO[bytes]) -> None:
        self._log = log
        self._buffer = b""
        self._answers, theirs = os.pipe()
        given = {
            **{name: getattr(args, name) for name in ("device", "devices", "quick", "emulated")},
            "graph_mode": args.graph_mode,
            "scratch": str(scratch),
            "answers": theirs,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.npu.smoke_checks.worker", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=environment(args.emulated),
            pass_fds=(theirs,),
            start_new_session=True,
        )
        os.close(theirs)

    def hello(self) -> dict[str, Any]:
        """What the device is and which checks there are, or why there are none. Raises `Died`."""
        return self._answer(START_SECONDS)

    def carry_out(self, name: str, seconds: float) -> dict[str, Any]:
        """A check's result. Raises `Died`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(name).encode() + b"\n")
            self._process.stdin.flush()
        return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise Died(f"timed out after {seconds:g} s")
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise Died(self._ending())
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_DIE)
        status = self._process.returncode
        if status is None:
            return "the process closed its answers and hangs"
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the process ended with {how}: {last_line(Path(self._log.name))}"

    def end(self) -> None:
        """Let it go, with all that it has started; one that is stuck in a driver is left alone."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self._process.poll() is not None else _SECONDS_TO_DIE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_DIE)
        os.close(self._answers)


def environment(emulated: bool) -> dict[str, str]:
    """Of workers, and of what they start."""
    wanted = dict(os.environ)
    # Else `import torch` itself fails where torch_npu is installed and CANN is not sourced.
    wanted["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # As nanoactor.placement.topology sets them for an engine's processes.
    wanted.setdefault("TASK_QUEUE_ENABLE", "1")
    if not emulated:
        wanted.pop(RUNTIME, None)
        return wanted
    site = ROOT / "tests" / "npu" / "site"
    wanted["PYTHONPATH"] = os.pathsep.join((str(site), str(ROOT)))
    wanted.setdefault(RUNTIME, "tests.npu.emulation:HostRuntime")
    return wanted


def last_line(path: Path) -> str:
    """Of a log."""
    said = path.read_bytes()[-4096:].decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(said) if line.strip()), "it says nothing")


@dataclasses.dataclass
class Smoke:
    """A run of all checks."""

    args: argparse.Namespace
    scratch: Path
    log: IO[bytes]
    worker: Worker | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    lost: int = 0
    """How many processes in a row have failed to open the device."""

    def start(self) -> str:
        """Open the device. Returns why that is impossible; nothing where it is not."""
        self.worker = Worker(self.args, self.scratch, self.log)
        try:
            said = self.worker.hello()
        except Died as died:
            return f"the process that opens the device: {died}; `nanoactor doctor` may say why"
        if "impossible" in said:
            return str(said["impossible"])
        self.versions, self.checks = said["versions"], said["checks"]
        return ""

    def rows(self) -> Iterator[dict[str, Any]]:
        """A line of the table after the other."""
        only = self.args.only
        for check in self.checks:
            if not only or any(part in check["name"] for part in only):
                yield {"check": check["name"], **self._carry_out(check)}

    def _carry_out(self, check: dict[str, Any]) -> dict[str, Any]:
        self.log.write(f"\n== {check['name']}\n".encode())
        self.log.flush()
        if check["skip"]:
            return skipped(check["skip"])
        if self.lost >= STARTS:
            return skipped("the device cannot be opened any more")
        if check["alone"]:
            self.end()
        begin = time.monotonic()
        try:
            worker = self._ready()
            found = worker.carry_out(check["name"], self.args.timeout or check["seconds"])
        except Died as died:
            seconds = time.monotonic() - begin
            found = {"result": "FAIL", "seconds": seconds, "said": str(died), "spoiled": True}
        if found.pop("spoiled") or check["alone"]:
            self.end()
        return found

    def _ready(self) -> Worker:
        """One that has opened the device. Raises `Died`."""
        if self.worker is None:
            self.worker, self.lost = Worker(self.args, self.scratch, self.log), self.lost + 1
            try:
                said = self.worker.hello()
            except Died as died:
                raise Died(f"a new process that opens the device: {died}") from died
            if "impossible" in said:
                raise Died(f"a new process cannot open the device: {said['impossible']}")
            self.lost = 0
        return self.worker

    def end(self) -> None:
        """Let the worker go."""
        if self.worker is not None:
            self.worker.end()
        self.worker = None


def skipped(why: str) -> dict[str, Any]:
    """What nobody ran."""
    return {"result": "SKIP", "seconds": 0.0, "said": why}


def line(row: dict[str, Any], emulated: bool) -> str:
    """Of the table."""
    said = " ".join(row["said"].split()).replace("|", "\\|")
    said = said if len(said) <= _LONGEST else said[: _LONGEST - 1] + "…"
    said = f"{EMULATED}; {said}".rstrip("; ") if emulated else said
    return f"| {row['result']} | {row['check']} | {row['seconds']:.1f} | {said} |"


def counted(rows: list[dict[str, Any]]) -> str:
    """The line below the table."""
    counts = collections.Counter(row["result"] for row in rows)
    names = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}
    return ", ".join(f"{counts[result]} {name}" for result, name in names.items())


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.npu.smoke", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="npu:0", help="npu:N")
    parser.add_argument("--devices", type=int, default=1, help="2: HCCL on npu:0 and npu:1, too")
    parser.add_argument("--quick", action="store_true", help="one type, one model's sizes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks whose names have a part")
    parser.add_argument("--graph-mode", default="npugraph", help="of the figures")
    parser.add_argument("--timeout", type=float, help="seconds of each check, instead of its own")
    parser.add_argument("--output", type=Path, help="the same as JSON")
    parser.add_argument("--log", type=Path, help="what checks print, and tracebacks")
    parser.add_argument("--emulated", action="store_true", help=EMULATED)
    args = parser.parse_args(words)
    if not args.device.startswith("npu"):
        parser.error(f"--device {args.device}: npu:N is wanted")
    return args


def report(smoke: Smoke) -> list[dict[str, Any]]:
    """Print the table, each line when it is known."""
    emulated, rows = smoke.args.emulated, []
    if emulated:
        print(f"**{EMULATED}**\n")
    print("| result | check | s | |\n|---|---|---|---|", flush=True)
    for row in smoke.rows():
        rows.append(row)
        print(line(row, emulated), flush=True)
    print(f"\n{counted(rows)}\n")
    print("; ".join(f"{name} {version}" for name, version in smoke.versions.items()), flush=True)
    return rows


def write(path: Path, smoke: Smoke, rows: list[dict[str, Any]]) -> None:
    """The table for programs."""
    found = {"emulated": smoke.args.emulated, "versions": smoke.versions, "rows": rows}
    path.write_text(json.dumps(found, indent=2) + "\n")


def main(words: list[str] | None = None) -> int:
    """Returns the exit status."""
    args = parse(words)
    path = args.log or Path(tempfile.gettempdir()) / f"nanoactor-smoke-{os.getpid()}.log"
    with tempfile.TemporaryDirectory() as scratch, path.open("wb") as log:
        smoke = Smoke(args, Path(scratch), log)
        try:
            if impossible := smoke.start():
                print(impossible, file=sys.stderr)
                return 2
            rows = report(smoke)
        finally:
            smoke.end()
        print(f"tracebacks, and what checks print: {path}", file=sys.stderr)
        if args.output:
            write(args.output, smoke, rows)
    return int(any(row["result"] == "FAIL" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
