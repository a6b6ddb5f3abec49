"""Another program, run so that it can neither hang this one nor outlive it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

_SECONDS_TO_DIE = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a program said, and what went wrong."""

    output: str
    trouble: str = ""
    """Empty where it ended with status 0."""


Run = Callable[[Sequence[str], Mapping[str, str], float], Outcome]
"""Program and arguments, environment, seconds."""


def run_command(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Outcome:
    """Run a program to its end, or until its time is up."""
    try:
        process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        return Outcome("", f"cannot be run: {error.strerror}")
    late = False
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        output, errors = _end(process)
    except BaseException:
        _end(process)
        raise
    said = output.decode(errors="replace")
    if late:
        return Outcome(said, f"no answer within {seconds:g} s")
    return Outcome(said, _trouble(process.returncode, errors.decode(errors="replace")))


def _end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What it has said. One that is stuck in a driver cannot be killed: it is left alone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_SECONDS_TO_DIE)
    except subprocess.TimeoutExpired as stuck:
        return stuck.output or b"", stuck.stderr or b""


def _trouble(status: int, errors: str) -> str:
    if status == 0:
        return ""
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "").strip()
    ended = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"{ended}: {last}" if last else ended
