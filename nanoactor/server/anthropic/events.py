"""Answers in the format of the Messages API: as a stream of events, or as a single message."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from nanoactor.server.answer import Answer
from nanoactor.server.anthropic.errors import error_body
from nanoactor.server.block_writer import BlockWriter, Event, encode, parse_arguments
from nanoactor.server.choices import Delta
from nanoactor.server.errors import APIError
from nanoactor.server.sealed import seal

_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thoughts": {"type": "thinking", "thinking": "", "signature": ""},
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thoughts": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_UNSIGNED = "unsigned"
"""Placeholder signature of a thinking block whose text is returned. Clients do not send back a
thinking block that has no signature."""


class MessagesWriter(BlockWriter):
    """Writes one message of the Messages API: as a stream of events, or as a whole."""

    ping = encode({"type": "ping"})

    def __init__(self, answer: Answer, *, omits_thoughts: bool = False) -> None:
        """Create the writer. If `omits_thoughts` is True, reasoning is returned in encoded form in
        the block's `signature`, instead of as text."""
        super().__init__(answer)
        self._omits_thoughts = omits_thoughts
        self._id = f"msg_{uuid.uuid4().hex[:24]}"
        self._is_broken = False
        """True if the arguments of a call are not a complete JSON object."""

    def begin(self, deltas: list[Delta]) -> bytes:
        """Return the events before the first token: a message without content, and a ping."""
        start = {"type": "message_start", "message": self._message(None)}
        return self.encode_events([start, {"type": "ping"}])

    def end(self) -> bytes:
        """Return the last events of a complete answer."""
        events, reason = self.close(), self._stop_reason
        delta = {"stop_reason": reason, "stop_sequence": self._stop_sequence(reason)}
        message_delta = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return self.encode_events([*events, message_delta, {"type": "message_stop"}])

    def error(self, problem: APIError) -> bytes:
        """Return the event that reports an error."""
        return self.encode_events([msgspec.to_builtins(error_body(problem))])

    def response(self) -> dict[str, Any]:
        """Return the complete message."""
        self.close()
        return self._message(self._stop_reason)

    def _message(self, reason: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.answer.body.model,
            "content": list(self.blocks),
            "stop_reason": reason,
            "stop_sequence": self._stop_sequence(reason),
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """Return the token counts so far, in Anthropic's format. Input tokens exclude the prompt
        tokens found in the prefix cache, which are known only once the answer is complete."""
        answer = self.answer
        return {
            "input_tokens": answer.prompt_tokens - answer.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answer.cached_tokens,
            "output_tokens": sum(answer.tokens_sent),
        }

    @property
    def _stop_reason(self) -> str:
        """The stop reason in Anthropic's terms. Never "tool_use" if a call is incomplete."""
        is_stopped = isinstance(self.answer.stop_reason, str)
        if self.reason == "length":
            return "max_tokens"
        if self._is_broken:
            return "stop_sequence" if is_stopped else "max_tokens"
        if any(block["type"] == "tool_use" for block in self.blocks):
            return "tool_use"
        return "stop_sequence" if is_stopped else "end_turn"

    def _stop_sequence(self, reason: str | None) -> str | None:
        stop = self.answer.stop_reason
        return stop if reason == "stop_sequence" and isinstance(stop, str) else None

    # -- blocks ---------------------------------------------------------------------------

    def encode_events(self, events: list[Event]) -> bytes:
        """Encode events as server-sent events, in bytes."""
        return b"".join(map(encode, events))

    def add_logprobs(self, entries: list[dict[str, Any]]) -> None:
        """Do nothing, because this API has no log-probabilities."""

    def new_block(self, kind: str, call: dict[str, Any]) -> dict[str, Any]:
        """Return an empty content block. `kind` is "text", "thoughts" or "call". For a call, `call`
        contains its id and name."""
        if kind == "call":
            return {"type": "tool_use", "id": call["id"], "name": call["name"], "input": {}}
        return dict(_EMPTY[kind])

    def open_events(self, kind: str) -> list[Event]:
        """Return the event that starts the latest block."""
        return [self._event("content_block_start", content_block=dict(self.blocks[-1]))]

    def delta_events(self, kind: str, text: str) -> list[Event]:
        """Return the event that appends `text` to the latest block. Return no event for reasoning
        that is omitted."""
        if kind == "thoughts" and self._omits_thoughts:
            return []
        name, member = _DELTAS[kind]
        return [self._event("content_block_delta", delta={"type": name, member: text})]

    def close_events(self, kind: str, text: str) -> list[Event]:
        """Store the complete text in the latest block, and return the events that end the block."""
        block, events = self.blocks[-1], []
        if kind == "text":
            block["text"] = text
        elif kind == "call":
            arguments = parse_arguments(text)
            self._is_broken = self._is_broken or arguments is None
            block["input"] = arguments or {}
        else:
            block["signature"] = seal(text) if self._omits_thoughts else _UNSIGNED
            block["thinking"] = "" if self._omits_thoughts else text
            signed = {"type": "signature_delta", "signature": block["signature"]}
            events.append(self._event("content_block_delta", delta=signed))
        return [*events, self._event("content_block_stop")]

    def _event(self, kind: str, **members: Any) -> Event:
        """Return an event of type `kind` about the latest block. `members` are its other
        members."""
        return {"type": kind, "index": len(self.blocks) - 1, **members}
