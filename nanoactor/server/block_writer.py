"""Base class of the writers for the Messages API and the Responses API. Both return text, reasoning
and calls as separate blocks."""

from __future__ import annotations

import abc
import json
from typing import Any

import msgspec

from nanoactor.server.answer import Answer
from nanoactor.server.choices import Delta
from nanoactor.server.tool_calls import replace_surrogates

Event = dict[str, Any]


def encode(event: Event) -> bytes:
    """Encode an event as JSON in a server-sent event, which is named after the event's `type`."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class BlockWriter(abc.ABC):
    """Converts chat deltas to a sequence of blocks. Each block contains text, reasoning or one
    call. Subclasses define the events of their API for the start, growth and end of a block."""

    ping = b""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.blocks: list[dict[str, Any]] = []
        self.reason: str | None = None
        """Finish reason as in a chat completion; None until the output has ended."""
        self._open = False
        self._texts: list[str] = []
        """Pieces of the latest block's text, reasoning or arguments."""

    @abc.abstractmethod
    def encode_events(self, events: list[Event]) -> bytes:
        """Encode events in the format of the API, in bytes."""

    @abc.abstractmethod
    def new_block(self, kind: str, call: dict[str, Any]) -> dict[str, Any]:
        """Return an empty block. `kind` is "text", "thoughts" or "call". `call` contains the id and
        name of a call, and is empty for the other kinds."""

    @abc.abstractmethod
    def open_events(self, kind: str) -> list[Event]:
        """Return the events that start the latest block."""

    @abc.abstractmethod
    def delta_events(self, kind: str, text: str) -> list[Event]:
        """Return the events that append `text` to the latest block."""

    @abc.abstractmethod
    def close_events(self, kind: str, text: str) -> list[Event]:
        """Store the complete text in the latest block, and return the events that end the block."""

    @abc.abstractmethod
    def add_logprobs(self, entries: list[dict[str, Any]]) -> None:
        """Store log-probabilities of tokens. Called before the text of these tokens is added."""

    def push(self, deltas: list[Delta]) -> bytes:
        """Process deltas of a streamed answer, and return their events."""
        return self.encode_events(self._events(deltas))

    def collect(self, deltas: list[Delta]) -> None:
        """Process deltas of an answer that is not streamed."""
        self._events(deltas)

    def close(self) -> list[Event]:
        """End the open block, and return its last events. Without an open block, return no
        events."""
        if not self._open:
            return []
        self._open = False
        return self.close_events(self._kind, "".join(self._texts))

    def _events(self, deltas: list[Delta]) -> list[Event]:
        events: list[Event] = []
        for choice in deltas:
            self.reason = choice["finish_reason"] or self.reason
            delta = choice["delta"]
            if logprobs := choice.get("logprobs"):
                self.add_logprobs(logprobs["content"])
            for kind, member in (("thoughts", "reasoning_content"), ("text", "content")):
                if text := delta.get(member):
                    events += self._add(kind, text)
            for call in delta.get("tool_calls", ()):
                events += self._call(call)
        return events

    def _add(self, kind: str, text: str) -> list[Event]:
        """Append text to the open block, and return the resulting events. If the open block has
        another kind, or none is open, start a new block first."""
        start_events = [] if self._open and self._kind == kind else self._begin(kind, {})
        self._texts.append(text)
        return [*start_events, *self.delta_events(kind, text)]

    def _call(self, call: dict[str, Any]) -> list[Event]:
        function = call["function"]
        start_events = self._begin("call", {**call, **function}) if "id" in call else []
        if not function["arguments"]:
            return start_events
        return [*start_events, *self._add("call", function["arguments"])]

    def _begin(self, kind: str, call: dict[str, Any]) -> list[Event]:
        end_events = self.close()
        self.blocks.append(self.new_block(kind, call))
        self._open, self._kind, self._texts = True, kind, []
        return [*end_events, *self.open_events(kind)]


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Parse the arguments of a call; an empty text stands for no arguments. Return None if the text
    is not a JSON object, for instance because it was cut off. Lone surrogates are replaced, so that
    the result can be encoded as JSON."""
    try:
        value = json.loads(text or "{}", strict=False, parse_constant=_reject_constant)
        msgspec.json.encode(value := _encodable(value))
    except (ValueError, RecursionError, OverflowError):
        return None
    return value if isinstance(value, dict) else None


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {replace_surrogates(name): _encodable(one) for name, one in value.items()}
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return [_encodable(one) for one in value] if isinstance(value, list) else value
