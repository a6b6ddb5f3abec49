"""Answers in the shapes of the Messages API: a chat's deltas as events, and as one message."""

from __future__ import annotations

import json
import uuid
from typing import Any

import msgspec

from nanoactor.server.answer import Answer
from nanoactor.server.anthropic.errors import error_body
from nanoactor.server.choices import Delta
from nanoactor.server.errors import APIError
from nanoactor.server.sealed import seal

Event = dict[str, Any]

_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_UNSIGNED = "unsigned"
"""The signature of thoughts that are shown: clients send back no block without one."""


def encode(event: Event) -> bytes:
    """Return an event as it goes over the wire."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class MessagesWriter:
    """Writes one answer."""

    def __init__(self, answer: Answer, *, omits_thoughts: bool = False) -> None:
        """`omits_thoughts`: thoughts are sealed in their block's signature, and not shown."""
        self._answer, self._omits = answer, omits_thoughts
        self._id = f"msg_{uuid.uuid4().hex[:24]}"
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Pieces of the last block's text, thoughts or arguments."""
        self._open = False
        self._reason: str | None = None

    # -- a stream -------------------------------------------------------------------------

    def begin(self, deltas: list[Delta]) -> bytes:
        """Return the events before the first token: the message, empty, and a ping."""
        start = {"type": "message_start", "message": self._message(None)}
        return encode(start) + encode({"type": "ping"})

    def push(self, deltas: list[Delta]) -> bytes:
        """Return the events of what is new."""
        return b"".join([encode(event) for event in self._events(deltas)])

    def end(self) -> bytes:
        """Return the events of an answer that is complete."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        told = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        events = [*self._close(), told, {"type": "message_stop"}]
        return b"".join([encode(event) for event in events])

    def error(self, problem: APIError) -> bytes:
        """Return the event of an error."""
        return encode(msgspec.to_builtins(error_body(problem)))

    # -- a whole --------------------------------------------------------------------------

    def take(self, deltas: list[Delta]) -> None:
        """Keep what is new."""
        self._events(deltas)

    def whole(self) -> dict[str, Any]:
        """Return the message."""
        self._close()
        return self._message(self._stop_reason)

    # -- both -----------------------------------------------------------------------------

    def _message(self, reason: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.body.model,
            "content": list(self._blocks),
            "stop_reason": reason,
            "stop_sequence": self._stop_sequence if reason else None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """Return the tokens: those of the prompt without those that the cache held, as in
        Anthropic's API. How many it held is known at the end."""
        answer = self._answer
        return {
            "input_tokens": answer.prompt_tokens - answer.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answer.cached,
            "output_tokens": sum(answer.told),
        }

    @property
    def _stop_sequence(self) -> str | None:
        stop = self._answer.stop_reason
        return stop if isinstance(stop, str) else None

    @property
    def _stop_reason(self) -> str:
        reason = self._reason or "stop"
        if reason != "length" and any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return _REASONS.get(reason, "end_turn")

    def _events(self, deltas: list[Delta]) -> list[Event]:
        events: list[Event] = []
        for one in deltas:
            self._reason = one["finish_reason"] or self._reason
            delta = one["delta"]
            if thoughts := delta.get("reasoning_content"):
                self._add("thinking", {"thinking": "", "signature": ""}, thoughts, events)
            if text := delta.get("content"):
                self._add("text", {"text": ""}, text, events)
            for call in delta.get("tool_calls", ()):
                self._call(call, events)
        return events

    def _call(self, call: dict[str, Any], events: list[Event]) -> None:
        function = call["function"]
        if "id" in call:
            events += self._close()
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            self._begin(block, events)
        if arguments := function["arguments"]:
            self._texts.append(arguments)
            events.append(self._delta("input_json_delta", "partial_json", arguments))

    def _add(self, kind: str, empty: dict[str, str], text: str, events: list[Event]) -> None:
        """Add text to a block of this kind, which is begun unless it is open."""
        if not self._open or self._blocks[-1]["type"] != kind:
            events += self._close()
            self._begin({"type": kind, **empty}, events)
        self._texts.append(text)
        if kind == "text":
            events.append(self._delta("text_delta", "text", text))
        elif not self._omits:
            events.append(self._delta("thinking_delta", "thinking", text))

    def _begin(self, block: dict[str, Any], events: list[Event]) -> None:
        self._blocks.append(block)
        self._open, self._texts = True, []
        index = len(self._blocks) - 1
        start = {"type": "content_block_start", "index": index, "content_block": dict(block)}
        events.append(start)

    def _delta(self, kind: str, member: str, value: str) -> Event:
        delta = {"type": kind, member: value}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        """End the block that is open, if one is, with what it has become."""
        if not self._open:
            return []
        self._open, block, text = False, self._blocks[-1], "".join(self._texts)
        events: list[Event] = []
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block["signature"] = seal(text) if self._omits else _UNSIGNED
            block["thinking"] = "" if self._omits else text
            events.append(self._delta("signature_delta", "signature", block["signature"]))
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object: empty where it was broken off in the midst."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
