"""Runs a file of `examples/` as a user would: from the root of a checkout."""

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from tests.conftest import survivors
from tests.product_files import ROOT


def run(name, *arguments, said="", **environment):
    """Run an example to its end; returns what it printed."""
    done = subprocess.run(
        [sys.executable, f"examples/{name}", *map(str, arguments)],
        cwd=ROOT,
        input=said,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def descendants(pid):
    """The processes below one; some may end while they are counted."""
    found = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found |= set(map(int, (task / "children").read_text().split()))
    return found | {one for child in found for one in descendants(child)}


class Started:
    """An example that serves: its process, and the lines that it has written."""

    def __init__(self, *command, **environment):
        self.process = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []
        self.family = set()
        self._wrote = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._wrote:
                self.lines.append(line.rstrip())
                self._wrote.notify_all()
        with self._wrote:
            self.lines.append(None)
            self._wrote.notify_all()

    def until(self, pattern, count=1):
        """Wait until so many lines match a pattern; returns the last match."""
        with self._wrote:
            while True:
                matches = [re.search(pattern, line) for line in self.lines if line is not None]
                found = [match for match in matches if match]
                if len(found) >= count:
                    self.family |= descendants(self.process.pid)
                    return found[count - 1]
                assert self.lines[-1:] != [None], self.lines
                self._wrote.wait()

    def end(self):
        """End it as a supervisor does, with SIGTERM; returns its status. It leaves no process."""
        self.process.terminate()
        code = self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        assert not survivors(self.family)
        return code


@contextlib.contextmanager
def started(*command, status=0, **environment):
    """An example that serves until it is left; then it must end well."""
    example = Started(*command, **environment)
    try:
        yield example
    except BaseException:
        example.end()
        raise
    assert example.end() == status, example.lines
    assert not [line for line in example.lines if line and "Traceback" in line], example.lines
