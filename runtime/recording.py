"""Recordings of an actor's inputs and outputs, and their replay.

An actor whose decisions depend only on its messages, such as a scheduler that reads no clock, makes
the same decisions when it receives the same messages again. A recording of a failed run therefore
reproduces that run, as often as needed. A successful replay proves that the actor has no other
inputs.

The file starts with one pickle: the actor's specification and the records that all actors published
when they were ready. Entries follow, each with a header, the edge's label, and the message in its
wire format. Replay only files that you trust, because unpickling can execute code.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.runtime.codec import HEADER, decode, encode
from nanoactor.runtime.errors import ReplayDiverged
from nanoactor.runtime.outbox import Outbox
from nanoactor.runtime.topology import ActorSpec

_ENTRY = struct.Struct("<BBI")
HANDLED, SENT, READY, NOT_READY, ON_READY, END = range(6)
_KIND_NAMES = ("handles", "sends", "finds room", "finds no room", "is notified of room", "ends")

Entry = tuple[int, str, bytes]
"""(kind, edge label, encoded message) of one recorded event. The message is empty for events other
than handling and sending."""


class Recorder:
    """Writer of one actor's recording, the file `<directory>/<actor>.recording`."""

    def __init__(self, directory: str, spec: ActorSpec, ready: Mapping[str, ReadyInfo]) -> None:
        path = Path(directory, f"{spec.name}.recording")
        self._file = path.open("wb")
        pickle.dump((spec, dict(ready)), self._file)

    def write(self, kind: int, label: str = "", message: Any = None) -> None:
        """Append one event to the file. `kind` is one of `HANDLED`, `SENT`, `READY`, `NOT_READY`,
        `ON_READY` and `END`."""
        body = b"" if message is None else encode(message).to_bytes(0)
        self._file.write(_ENTRY.pack(kind, len(label), len(body)) + label.encode() + body)

    def handlers(self, handlers: Mapping[type, Handler]) -> dict[type, Handler]:
        """Return the handlers, wrapped so that each message is recorded before it is handled."""

        def recorded(handler: Handler) -> Handler:
            def handle(message: Any) -> None:
                self.write(HANDLED, message=message)
                handler(message)

            return handle

        return {cls: recorded(handler) for cls, handler in handlers.items()}

    def on_ready(self, call: Callable[[Outbox], None]) -> Callable[[Outbox], None]:
        """Return `call`, wrapped so that each call is recorded before it is made."""

        def recorded(outbox: Outbox) -> None:
            self.write(ON_READY, outbox.label)
            call(outbox)

        return recorded

    def close(self) -> None:
        """Append the end event and close the file."""
        self.write(END)
        self._file.close()


class RecordedOutbox:
    """Outbox that records every message and every readiness check, and forwards them to another
    outbox."""

    def __init__(self, outbox: Outbox, recorder: Recorder) -> None:
        self.label = outbox.label
        self._outbox = outbox
        self._recorder = recorder

    def send(self, message: Any) -> None:
        """Record the message, then send it."""
        self._recorder.write(SENT, self.label, message)
        self._outbox.send(message)

    @property
    def ready(self) -> bool:
        """Readiness of the underlying outbox. Each reading is recorded, because the actor's
        decisions may depend on it."""
        ready = self._outbox.ready
        self._recorder.write(READY if ready else NOT_READY, self.label)
        return ready

    def statistics(self) -> dict[str, int]:
        """Return the statistics of the underlying outbox."""
        return self._outbox.statistics()


def read_recording(path: Path) -> tuple[ActorSpec, dict[str, ReadyInfo], Iterator[Entry]]:
    """Return the actor's specification, the records published by all actors, and an iterator over
    the recorded events."""
    file = io.BytesIO(path.read_bytes())
    spec, ready = pickle.load(file)  # noqa: S301 - the module's docstring warns
    return spec, ready, _entries(file)


def _entries(file: io.BytesIO) -> Iterator[Entry]:
    while len(header := file.read(_ENTRY.size)) == _ENTRY.size:
        kind, label_size, size = _ENTRY.unpack(header)
        label, body = file.read(label_size).decode(), file.read(size)
        if len(body) < size:  # the process died during the write
            return
        yield kind, label, body


def replay(path: Path) -> int:
    """Create a recorded actor again, send it the recorded messages, and compare what it sends.

    Returns the number of messages handled. Raises `ReplayDiverged` if the actor behaves differently
    from the recording.
    """
    spec, ready, entries = read_recording(path)
    script = _Script(spec.name, entries)
    actor = spec.create()
    actor.setup()
    loop = asyncio.new_event_loop()  # a context needs one; an actor that uses it cannot be replayed
    try:
        actor.start(Context(spec.name, loop, script, _raise), ready)
        return _replay_entries(script, actor)
    finally:
        loop.close()


def _replay_entries(script: _Script, actor: Actor) -> int:
    handlers = actor.handlers()
    handled = 0
    with contextlib.suppress(_RecordingEnded):
        while (entry := script.next())[0] != END:
            kind, label, body = entry
            if kind == HANDLED:
                message = decode(body, 0)
                handlers[type(message)](message)
                handled += 1
            elif kind == ON_READY:
                actor.on_ready(script[label])
            else:
                raise ReplayDiverged(
                    f"{script.name} does nothing, but in the recording it {_describe(entry)}"
                )
    return handled


def _raise(error: BaseException) -> None:
    raise error


def _describe(entry: Entry) -> str:
    kind, label, body = entry
    what = f" {decode(body, 0)!r}" if body else ""
    return f"{_KIND_NAMES[kind]}{' ' + label if label else ''}{what}"


class _RecordingEnded(Exception):
    """The recording ends without an end event, for example because the recorded process was
    killed."""


class _Script(dict[str, Outbox]):
    """The recorded events in order. As a dict, it maps each label to an outbox that compares the
    replayed actor's behavior with these events."""

    def __init__(self, name: str, entries: Iterator[Entry]) -> None:
        self.name = name
        self._entries = entries

    def __missing__(self, label: str) -> Outbox:
        self[label] = _ScriptedOutbox(label, self)
        return self[label]

    def next(self) -> Entry:
        entry = next(self._entries, None)
        if entry is None:
            raise _RecordingEnded
        return entry

    def expect(self, *entries: Entry) -> Entry:
        """Return the next event. Raises `ReplayDiverged` unless it equals one of `entries`, apart
        from times and sequence numbers."""
        actual = self.next()
        for entry in entries:
            if actual[:2] == entry[:2] and actual[2][HEADER.size :] == entry[2][HEADER.size :]:
                return actual
        raise ReplayDiverged(
            f"{self.name} {_describe(entries[0])}, but in the recording it {_describe(actual)}"
        )


class _ScriptedOutbox:
    def __init__(self, label: str, script: _Script) -> None:
        self.label = label
        self._script = script

    def send(self, message: Any) -> None:
        self._script.expect((SENT, self.label, bytes(encode(message).to_bytes(0))))

    @property
    def ready(self) -> bool:
        entry = self._script.expect((READY, self.label, b""), (NOT_READY, self.label, b""))
        return entry[0] == READY

    def statistics(self) -> dict[str, int]:
        return {}
