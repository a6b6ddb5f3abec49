"""A disposable process for programs that come with a model.

A chat template is a program: a sandbox prevents harm, but not an endless loop or the exhaustion of
memory. So are a tokenizer's regular expressions and replacements, unless they are known to be
bounded (`patterns.py`). They run in a child of the rendering process, with limits on its CPU time,
its memory and its output; past one of them the child is killed and another started.
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

_LOOK = 0.02
"""Seconds between two checks of a child's CPU time."""
_WALL = 10.0
"""Wall-clock limit as a multiple of the CPU limit: a child may have to wait for a CPU."""
_START = 5.0
"""Extra seconds allowed for startup."""
_FIRST = 0.5
"""Seconds after which a conversation lets the next ones go first."""


@dataclasses.dataclass(frozen=True, slots=True)
class RenderOptions:
    """The template, and its limits for one conversation."""

    seconds: float
    """Limit of CPU time in seconds."""
    characters: int
    """Limit of output characters."""
    template: str | None = None
    """Its source; None is the model's own."""


class Overdue(Exception):
    """The template takes too long."""


class _Ended(Exception):
    """The child is gone."""


class _Child:
    """The child process and its request protocol."""

    def __init__(self, directory: Path, options: RenderOptions) -> None:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        program = (
            f"import sys; sys.path[:] = {path!r}; "
            # First, as everything else takes a moment, in which the parent may end.
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
        """Send it work; if it is gone, `answer` reports that."""
        assert self.process.stdin is not None
        body = json.dumps(request).encode()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(LENGTH.pack(len(body)) + body)
            self.process.stdin.flush()

    def answer(self, limit: float) -> Any:
        """Wait for its answer, for `limit` seconds of its CPU time.

        Raises `Overdue` if it takes longer, `_Ended` if the child is gone.
        """
        begin, used = time.monotonic(), self._cpu_seconds()

        def check() -> None:
            if self._cpu_seconds() - used > limit or time.monotonic() - begin > _WALL * limit:
                raise Overdue

        (length,) = LENGTH.unpack(self._read(LENGTH.size, check))
        return json.loads(self._read(length, check))

    def _read(self, size: int, check: Callable[[], None]) -> bytes:
        assert self.process.stdout is not None
        descriptor, data = self.process.stdout.fileno(), bytearray()
        while len(data) < size:
            if not select.select([descriptor], [], [], _LOOK)[0]:
                check()
                continue
            part = os.read(descriptor, size - len(data))
            if not part:
                raise _Ended
            data += part
        return bytes(data)

    def _cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Kill it and clean up."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


class Renderer:
    """Renders a model's template. It blocks, and the child's life is tied to the calling thread."""

    def __init__(self, directory: Path, options: RenderOptions) -> None:
        """Create the renderer without starting its process."""
        self._directory, self._options = directory, options
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self.cancelled = False
        """True if the current rendering is to end; reset for the next one."""

    def describe(self) -> tuple[TemplateFacts, str]:
        """Return the template's capabilities, and the error of the test rendering, if any. Raises
        `ModelError` if the template is malformed, `InvalidRequest` if even reading it exceeds the
        time limit."""
        if not read_template_files(self._directory, self._options.template).sources:
            return TemplateFacts(), ""
        try:
            found = self.ask(["facts"], self._options.seconds)
        except Overdue:
            raise self.stopped() from None
        names = {key: tuple(found[key]) for key in ("variables", "members")}
        facts = TemplateFacts(**{**found, **names})
        try:
            tried = self.ask(["probe"], self._options.seconds)
        except Overdue:
            return facts, str(self.stopped())
        except InvalidRequest as error:
            return facts, str(error)
        tried["thoughts"] = facts.possible(tried["thoughts"])
        tried["thoughts_vary"] = tried["thoughts_vary"] and facts.knows_thoughts
        return dataclasses.replace(facts, **tried), ""

    def render(self, messages: str, options: str, seconds: float) -> str:
        """Return the prompt for a conversation, both given as JSON, within `seconds` seconds of CPU
        time; raises `InvalidRequest`, or `Overdue` if it takes longer."""
        text: str = self.ask(["render", messages, options], seconds)
        return text

    def stopped(self, request: list[Any] | None = None) -> InvalidRequest:
        """Return the error of a request that has used all of the allowed time."""
        what, seconds = _subject(request), self._options.seconds
        return InvalidRequest(f"{what} was stopped: it takes longer than {seconds:g} s")

    def ask(self, request: list[Any], seconds: float) -> Any:
        """Return the child's answer within `seconds` of CPU time; raises as `render` does."""
        try:
            try:
                answer = self._asked(request, seconds)
            except _Ended:  # perhaps by a cancellation that came too late for the one before
                self.end()
                answer = self._asked(request, seconds)
        except Overdue:
            self.end()
            raise
        except _Ended:
            self.end()
            text = f"{_subject(request)} was stopped: its process has ended"
            raise InvalidRequest(text) from None
        if "model_error" in answer:
            self.end()
            raise ModelError(answer["model_error"])
        if "error" in answer:
            if answer["spent"]:
                self.end()
            raise InvalidRequest(answer["error"])
        return answer["value"]

    def _asked(self, request: list[Any], seconds: float) -> Any:
        with self._lock:
            if self.cancelled:
                raise _Ended
            fresh = self._child is None
            self._child = self._child or _Child(self._directory, self._options)
            child = self._child
        if fresh:
            try:
                ready = child.answer(self._options.seconds + _START)
            except _Ended:
                if self.cancelled:
                    raise
                self.end()
                raise OutOfResources(
                    "the process of the chat template ended before it had begun: the machine may "
                    "have no more memory, threads or descriptors; its output is in the log"
                ) from None
            if "model_error" in ready:
                return ready
        child.send(request)
        return child.answer(seconds)

    def cancel(self) -> None:
        """End the current rendering with an error; from any thread."""
        with self._lock:
            self.cancelled = True
            if self._child is not None:
                self._child.process.kill()

    def end(self) -> None:
        """End the child; the next call starts another."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.end()


Done = Callable[[Any], None]
"""Called with the prompt, or the ids, or the `Exception` raised instead."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class _Job:
    """A conversation; lower ones go first."""

    turn: int
    """0 at first, 1 after it has been put behind the others; negative ends the thread."""
    place: int
    number: int = dataclasses.field(compare=False)
    request: list[Any] = dataclasses.field(compare=False)
    done: Done = dataclasses.field(compare=False)


class RenderQueue:
    """A thread with a renderer: one conversation at a time, results by callback.

    They run in order, but one that takes long is restarted after the others.
    """

    def __init__(self, directory: Path, options: RenderOptions) -> None:
        """Starts the thread, and the child if the model has a template."""
        self._renderer = Renderer(directory, options)
        self._seconds = options.seconds
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._places = itertools.count()
        self._described: queue.SimpleQueue[tuple[TemplateFacts, str] | Exception]
        self._described = queue.SimpleQueue()
        files = read_template_files(directory, options.template)
        self._exists, self.note = bool(files.sources), files.note
        self._lock = threading.Lock()
        self._known: set[int] = set()
        """Numbers of unfinished conversations that are still wanted."""
        self._current: int | None = None
        self._thread = threading.Thread(target=self._run, name="render", daemon=True)
        self._thread.start()

    def describe(self) -> tuple[TemplateFacts, str]:
        """Wait for `Renderer.describe`; once, at the start."""
        found = self._described.get()
        if isinstance(found, Exception):
            raise found
        return found

    def render(self, number: int, messages: str, options: str, done: Done) -> None:
        """Render a conversation; `done` is called on the queue's thread."""
        if not self._exists:
            text = "the model has no chat template; give a text prompt instead of messages"
            done(InvalidRequest(text))
            return
        self._put(number, ["render", messages, options], done)

    def encode(self, number: int, pieces: Sequence[Piece], done: Done) -> None:
        """Encode texts if the tokenizer is not known to be bounded; `done` is called on the queue's
        thread, with a list of ids for each."""
        self._put(number, ["encode", [*pieces]], done)

    def spans(self, number: int, prompts: Sequence[Any], done: Done) -> None:
        """Find the tokens of prompts, texts or ids, in the text of an unbounded tokenizer; `done`
        is called on the queue's thread, with `Spans` as lists."""
        self._put(number, ["spans", [*prompts]], done)

    def _put(self, number: int, request: list[Any], done: Done) -> None:
        with self._lock:
            self._known.add(number)
        self._jobs.put(_Job(0, next(self._places), number, request, done))

    def cancel(self, number: int) -> None:
        """End a conversation with `Cancelled` unless it is finished."""
        with self._lock:
            if number in self._known:
                self._known.remove(number)
                if self._current == number:
                    self._renderer.cancel()

    def cancel_all(self) -> None:
        """End all conversations with `Cancelled`; their numbers may be reused."""
        with self._lock:
            for number in [*self._known]:
                self._known.remove(number)
                if self._current == number:
                    self._renderer.cancel()
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait().done(Cancelled())

    def _run(self) -> None:
        try:
            self._described.put(self._renderer.describe())
        except Exception as error:  # raised where it is waited for
            self._described.put(error)
        while (job := self._jobs.get()).turn >= 0:
            result = self._render(job)
            if isinstance(result, Overdue):
                again = dataclasses.replace(job, turn=1, place=next(self._places))
                self._jobs.put(again)
            else:
                job.done(result)
        self._renderer.end()

    def _render(self, job: _Job) -> Any:
        with self._lock:
            self._current = job.number if job.number in self._known else None
            self._renderer.cancelled = False
        if self._current is None:
            return Cancelled()
        seconds = self._seconds if job.turn else min(_FIRST, self._seconds)
        result: Any
        try:
            result = self._renderer.ask(job.request, seconds)
        except Overdue as error:
            result = error if seconds < self._seconds else self._renderer.stopped(job.request)
        except Exception as error:  # a template is a program: it can fail in any way
            result = error
        with self._lock:
            self._current = None
            if job.number not in self._known:
                return Cancelled()
            if not isinstance(result, Overdue):
                self._known.remove(job.number)
        return result

    def close(self) -> None:
        """End the child and the thread."""
        with self._lock:
            self._known.clear()
        self._jobs.put(_Job(-1, 0, 0, [], lambda result: None))
        self._renderer.cancel()
        self._thread.join(timeout=2.0)


def _subject(request: list[Any] | None) -> str:
    """Return the subject of error messages."""
    tokenizes = request is not None and request[0] in ("encode", "spans")
    return "the tokenizer" if tokenizes else "the chat template"


class Cancelled(Exception):
    """The conversation's prompt is no longer wanted."""
