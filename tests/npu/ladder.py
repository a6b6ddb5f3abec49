"""The Ascend ladder as far as it goes without an NPU: each rung a command of its own.

    python -m tests.npu.ladder [RUNG ...] [--long]

Rung 0 runs without torch_npu; rungs 1 to 4 in `.venv-npu`, which `make test-npu` builds, with
stand-ins for CANN. docs/ascend.md says what each rung proves.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "tests/npu/wheel"


@dataclasses.dataclass(frozen=True)
class Rung:
    """Which files prove what, and in which environment."""

    proves: str
    files: tuple[str, ...]
    environment: str
    soft: bool = False
    parallel: bool = False


RUNGS = {
    0: Rung(
        "the engine on reference kernels",
        (
            "tests/npu/test_reference.py",
            "tests/npu/test_device.py",
            "tests/npu/test_smoke.py",
            "tests/npu/test_smoke_checks.py",
            "tests/npu/test_engine.py",
            "tests/npu/test_structured_outputs.py",
            "tests/npu/test_vision.py",
            "tests/npu/test_pooling.py",
            "tests/npu/test_wheels.py",
        ),
        ".venv",
        parallel=True,
    ),
    1: Rung("schemas, call sites, names", (f"{WHEEL}/test_schemas.py",), ".venv-npu"),
    2: Rung("steps without values", (f"{WHEEL}/test_trace.py",), ".venv-npu", soft=True),
    3: Rung("graphs", (f"{WHEEL}/test_graphs.py",), ".venv-npu", True, True),
    4: Rung("the engine on npu:0", (f"{WHEEL}/test_soft_device.py",), ".venv-npu", True, True),
}


def command(rung: Rung, long: bool) -> list[str]:
    """pytest, and what it runs."""
    marks = "not gpu" if long else "not gpu and not long"
    parallel = ["-n", "2", "--dist", "worksteal"] if rung.parallel else []
    # The wheel warns of much that is not ours.
    warnings = ["-W", "ignore", "--disable-warnings"] if rung.environment != ".venv" else []
    python = str(ROOT / rung.environment / "bin" / "python")
    return [python, "-m", "pytest", *parallel, *warnings, "-m", marks, *rung.files]


def environment(rung: Rung) -> dict[str, str]:
    """With the stand-ins, and a soft device where one is asked for."""
    values = dict(os.environ)
    if rung.environment == ".venv":
        return values
    values["LD_LIBRARY_PATH"] = str(ROOT / ".venv-npu" / "cann")
    # An operator's failure is then raised where it is called.
    values |= {"FAKE_NPU_COUNT": "1", "TASK_QUEUE_ENABLE": "0"}
    if rung.soft:
        values["CANN_STUB_SOFT_DEVICE"] = "1"
    return values


def main() -> None:
    """Run the rungs that are asked for; the exit status is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rungs", nargs="*", type=int, choices=[*RUNGS, []], default=[])
    parser.add_argument("--long", action="store_true", help="the wider matrix, other releases")
    args = parser.parse_args()
    wanted = list(args.rungs or RUNGS)
    # Two at a time, so that one computes while the other starts or waits for its last test.
    with ThreadPoolExecutor(2) as pool:
        lines = list(pool.map(lambda number: climb(number, args.long), wanted))
    print("\n".join(lines))
    sys.exit(int(any("failed" in line for line in lines)))


def climb(number: int, long: bool) -> str:
    """Run a rung; returns its line."""
    rung, begin = RUNGS[number], time.monotonic()
    print(f"rung {number}: {rung.proves}", flush=True)
    done = subprocess.run(command(rung, long), cwd=ROOT, env=environment(rung), check=False)
    word = "failed" if done.returncode else "passed"
    seconds = time.monotonic() - begin
    return f"rung {number}  {word}  {seconds:4.0f} s  {rung.proves}"


if __name__ == "__main__":
    main()
