"""A disposable process for the programs that are part of a model.

A chat template is a program. Jinja's sandbox prevents access to the system, but not an endless loop
or the exhaustion of memory. The same applies to a tokenizer's regular expressions and replacements,
unless their time and memory are known to be bounded (`patterns.py`). Such programs run in a child
process with limits on CPU time, memory and output. A child that exceeds its time or memory limit is
killed, and the next request starts a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoactor.errors import InvalidRequest, OutOfResources
from nanoactor.models.errors import ModelError
from nanoactor.runtime.process import interpreter, working_directory
from nanoactor.text.render_child import LENGTH
from nanoactor.text.template import TemplateFacts
from nanoactor.text.template_files import read_template_files

if TYPE_CHECKING:
    from nanoactor.text.tokenizer import Piece

_POLL_SECONDS = 0.02
"""Seconds between two checks of the child's CPU time."""
_WALL_CLOCK_FACTOR = 10.0
"""Wall-clock limit as a multiple of the CPU time limit, because a child may have to wait for a
CPU."""
_STARTUP_SECONDS = 5.0
"""Additional seconds of CPU time for the start of the child."""
_FIRST_ATTEMPT_SECONDS = 0.5
"""Seconds of CPU time after which the first attempt of a job is stopped. The job is then queued
again, behind all new jobs."""


@dataclasses.dataclass(frozen=True, slots=True)
class RenderOptions:
    """A chat template, and the limits for rendering one conversation."""

    seconds: float
    """Maximum CPU time in seconds."""
    characters: int
    """Maximum length of a rendered prompt, in characters."""
    template: str | None = None
    """Source of the template; None selects the model's own template."""


class TimeLimitExceeded(Exception):
    """A request took more CPU time or wall-clock time than its limit."""


class _ChildEnded(Exception):
    """The child process has ended."""


class _Child:
    """The child process and its pipes: sends requests and receives replies."""

    def __init__(self, directory: Path, options: RenderOptions) -> None:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        program = (
            f"import sys; sys.path[:] = {path!r}; "
            # First, because the parent may end while the other imports are running.
            "from nanoactor.runtime.process import die_with_parent; "
            f"die_with_parent({os.getpid()}, 'template'); "
            "from nanoactor.text.render_child import main; "
            f"main({str(directory)!r}, {options.characters})"
        )
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
            [interpreter(), "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=working_directory(),
        )
        self.send([options.template])

    def send(self, request: list[Any]) -> None:
        """Send a request to the child. If the child has ended, the error is raised by `answer`."""
        assert self.process.stdin is not None
        body = json.dumps(request).encode()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(LENGTH.pack(len(body)) + body)
            self.process.stdin.flush()

    def answer(self, limit: float) -> Any:
        """Return the child's reply. Wait for it for up to `limit` seconds of the child's CPU time,
        or ten times as long by the wall clock.

        Raises `TimeLimitExceeded` after that time, and `_ChildEnded` if the child has ended.
        """
        begin, used = time.monotonic(), self._cpu_seconds()

        def check() -> None:
            if (
                self._cpu_seconds() - used > limit
                or time.monotonic() - begin > _WALL_CLOCK_FACTOR * limit
            ):
                raise TimeLimitExceeded

        (length,) = LENGTH.unpack(self._read(LENGTH.size, check))
        return json.loads(self._read(length, check))

    def _read(self, size: int, check: Callable[[], None]) -> bytes:
        assert self.process.stdout is not None
        descriptor, data = self.process.stdout.fileno(), bytearray()
        while len(data) < size:
            if not select.select([descriptor], [], [], _POLL_SECONDS)[0]:
                check()
                continue
            part = os.read(descriptor, size - len(data))
            if not part:
                raise _ChildEnded
            data += part
        return bytes(data)

    def _cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Kill the child and close its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


class Renderer:
    """Runs a model's chat template and tokenizer in a child process. All calls block. The child
    ends together with the thread that started it."""

    def __init__(self, directory: Path, options: RenderOptions) -> None:
        """Create the renderer. The first request starts the child."""
        self._directory, self._options = directory, options
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self.cancelled = False
        """True if the current job was canceled. Set to False at the start of the next job."""

    def describe(self) -> tuple[TemplateFacts, str]:
        """Return the template's capabilities, and the error of a test rendering (empty if it
        succeeded). Raises `ModelError` if the template is malformed, and `InvalidRequest` if
        reading it exceeds the time limit."""
        if not read_template_files(self._directory, self._options.template).sources:
            return TemplateFacts(), ""
        try:
            found = self.ask(["facts"], self._options.seconds)
        except TimeLimitExceeded:
            raise self.time_limit_error() from None
        names = {key: tuple(found[key]) for key in ("variables", "members")}
        facts = TemplateFacts(**{**found, **names})
        try:
            probed = self.ask(["probe"], self._options.seconds)
        except TimeLimitExceeded:
            return facts, str(self.time_limit_error())
        except InvalidRequest as error:
            return facts, str(error)
        probed["thoughts"] = facts.effective_thoughts(probed["thoughts"])
        probed["reasoning_varies"] = probed["reasoning_varies"] and facts.has_reasoning
        return dataclasses.replace(facts, **probed), ""

    def render(self, messages: str, options: str, seconds: float) -> str:
        """Render a conversation to a prompt within `seconds` of CPU time. `messages` and `options`
        are JSON texts. Raises `InvalidRequest` if rendering fails, and `TimeLimitExceeded` if it
        takes too long."""
        text: str = self.ask(["render", messages, options], seconds)
        return text

    def time_limit_error(self, request: list[Any] | None = None) -> InvalidRequest:
        """Return the error for a request that exceeded its time limit."""
        what, seconds = _subject_of(request), self._options.seconds
        return InvalidRequest(f"{what} was stopped because it took longer than {seconds:g} s")

    def ask(self, request: list[Any], seconds: float) -> Any:
        """Send a request to the child and return its reply, within `seconds` of CPU time. Raises
        the errors of `render`."""
        try:
            try:
                answer = self._ask_once(request, seconds)
            except _ChildEnded:  # a late cancellation of the previous request may have ended it
                self.end()
                answer = self._ask_once(request, seconds)
        except TimeLimitExceeded:
            self.end()
            raise
        except _ChildEnded:
            self.end()
            text = f"{_subject_of(request)} failed because its process has ended"
            raise InvalidRequest(text) from None
        if "model_error" in answer:
            self.end()
            raise ModelError(answer["model_error"])
        if "error" in answer:
            if answer["must_restart"]:
                self.end()
            raise InvalidRequest(answer["error"])
        return answer["value"]

    def _ask_once(self, request: list[Any], seconds: float) -> Any:
        with self._lock:
            if self.cancelled:
                raise _ChildEnded
            is_new = self._child is None
            self._child = self._child or _Child(self._directory, self._options)
            child = self._child
        if is_new:
            try:
                ready = child.answer(self._options.seconds + _STARTUP_SECONDS)
            except _ChildEnded:
                if self.cancelled:
                    raise
                self.end()
                raise OutOfResources(
                    "the process that renders the chat template ended before it was ready, "
                    "perhaps because the machine is out of memory, threads or file "
                    "descriptors; see its output in the log"
                ) from None
            if "model_error" in ready:
                return ready
        child.send(request)
        return child.answer(seconds)

    def cancel(self) -> None:
        """Cancel the current request, which then fails. Thread-safe."""
        with self._lock:
            self.cancelled = True
            if self._child is not None:
                self._child.process.kill()

    def end(self) -> None:
        """End the child. The next request starts a new one."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.end()


Done = Callable[[Any], None]
"""Callback that receives the result of a job, or the exception that it raised."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class _Job:
    """A queued request. Jobs run in ascending order of (`attempt`, `sequence_number`)."""

    attempt: int
    """0 for a new job, 1 for one that was stopped and queued again. A negative value ends the
    thread."""
    sequence_number: int
    number: int = dataclasses.field(compare=False)
    request: list[Any] = dataclasses.field(compare=False)
    done: Done = dataclasses.field(compare=False)


class RenderQueue:
    """A thread that runs jobs in a `Renderer`, one at a time, and passes the results to callbacks.

    Jobs run in order of arrival. The time limit of a job's first attempt is short. A job that
    exceeds it is stopped and run again, with the full limit, once no new job is waiting.
    """

    def __init__(self, directory: Path, options: RenderOptions) -> None:
        """Start the thread, which also reads the model's template."""
        self._renderer = Renderer(directory, options)
        self._seconds = options.seconds
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._sequence_numbers = itertools.count()
        self._described: queue.SimpleQueue[tuple[TemplateFacts, str] | Exception]
        self._described = queue.SimpleQueue()
        files = read_template_files(directory, options.template)
        self._has_template, self.note = bool(files.sources), files.note
        self._lock = threading.Lock()
        self._active: set[int] = set()
        """Numbers of the unfinished jobs that were not canceled."""
        self._current: int | None = None
        self._thread = threading.Thread(target=self._run, name="render", daemon=True)
        self._thread.start()

    def describe(self) -> tuple[TemplateFacts, str]:
        """Wait for the result of `Renderer.describe`, which the thread computes at startup. May be
        called only once."""
        found = self._described.get()
        if isinstance(found, Exception):
            raise found
        return found

    def render(self, number: int, messages: str, options: str, done: Done) -> None:
        """Queue a conversation for rendering. `number` identifies the job for `cancel`. `done` is
        called on the queue's thread. If the model has no template, `done` is called immediately,
        with the error."""
        if not self._has_template:
            text = "the model has no chat template; give a text prompt instead of messages"
            done(InvalidRequest(text))
            return
        self._put(number, ["render", messages, options], done)

    def encode(self, number: int, pieces: Sequence[Piece], done: Done) -> None:
        """Queue texts to be tokenized in the child process, because the tokenizer may need
        unbounded time or memory. `done` is called on the queue's thread with a list of token ids
        per text."""
        self._put(number, ["encode", [*pieces]], done)

    def spans(self, number: int, prompts: Sequence[Any], done: Done) -> None:
        """Queue prompts (texts or token ids) to find the position of each token, in the child
        process, because the tokenizer may need unbounded time or memory. `done` is called on the
        queue's thread with one pair of lists per prompt: the bytes of its first token, and the
        index in the text at which each token starts."""
        self._put(number, ["spans", [*prompts]], done)

    def _put(self, number: int, request: list[Any], done: Done) -> None:
        with self._lock:
            self._active.add(number)
        self._jobs.put(_Job(0, next(self._sequence_numbers), number, request, done))

    def cancel(self, number: int) -> None:
        """Cancel a job, unless it has finished. Its callback receives `Cancelled`."""
        with self._lock:
            if number in self._active:
                self._active.remove(number)
                if self._current == number:
                    self._renderer.cancel()

    def cancel_all(self) -> None:
        """Cancel all jobs. Their callbacks receive `Cancelled`, and their numbers may be used
        again."""
        with self._lock:
            for number in [*self._active]:
                self._active.remove(number)
                if self._current == number:
                    self._renderer.cancel()
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait().done(Cancelled())

    def _run(self) -> None:
        try:
            self._described.put(self._renderer.describe())
        except Exception as error:  # raised by `describe`
            self._described.put(error)
        while (job := self._jobs.get()).attempt >= 0:
            result = self._render(job)
            if isinstance(result, TimeLimitExceeded):
                requeued = dataclasses.replace(
                    job, attempt=1, sequence_number=next(self._sequence_numbers)
                )
                self._jobs.put(requeued)
            else:
                job.done(result)
        self._renderer.end()

    def _render(self, job: _Job) -> Any:
        with self._lock:
            self._current = job.number if job.number in self._active else None
            self._renderer.cancelled = False
        if self._current is None:
            return Cancelled()
        seconds = self._seconds if job.attempt else min(_FIRST_ATTEMPT_SECONDS, self._seconds)
        result: Any
        try:
            result = self._renderer.ask(job.request, seconds)
        except TimeLimitExceeded as error:
            result = (
                error if seconds < self._seconds else self._renderer.time_limit_error(job.request)
            )
        except Exception as error:  # a template is a program and may raise any exception
            result = error
        with self._lock:
            self._current = None
            if job.number not in self._active:
                return Cancelled()
            if not isinstance(result, TimeLimitExceeded):
                self._active.remove(job.number)
        return result

    def close(self) -> None:
        """End the child process and the thread."""
        with self._lock:
            self._active.clear()
        self._jobs.put(_Job(-1, 0, 0, [], lambda result: None))
        self._renderer.cancel()
        self._thread.join(timeout=2.0)


def _subject_of(request: list[Any] | None) -> str:
    """Return "the tokenizer" or "the chat template", as the subject of an error message."""
    is_tokenizing = request is not None and request[0] in ("encode", "spans")
    return "the tokenizer" if is_tokenizing else "the chat template"


class Cancelled(Exception):
    """The job was canceled, so it has no result."""
