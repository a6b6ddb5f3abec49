"""Answers in the format of the Responses API: as a stream of events, or as a single response."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from nanoactor.server.answer import Answer
from nanoactor.server.block_writer import BlockWriter, Event, encode, parse_arguments
from nanoactor.server.choices import Delta
from nanoactor.server.errors import APIError
from nanoactor.server.responses.request import ResponsesRequest, ResponsesTool
from nanoactor.server.responses.scores import Entry, TokenScores
from nanoactor.server.responses.translate import Tools
from nanoactor.server.sealed import seal

_KINDS = {
    "text": ("message", "msg"),
    "thoughts": ("reasoning", "rs"),
    "call": ("function_call", "fc"),
}
"""Type of the output item, and prefix of the item's id, by kind of block."""
_INCLUDE_SEALED = "reasoning.encrypted_content"


class ResponsesWriter(BlockWriter):
    """Writes one answer in the format of the Responses API. Each block is an output item."""

    def __init__(self, answer: Answer, body: ResponsesRequest, tools: Tools) -> None:
        super().__init__(answer)
        self._tools = tools
        self._seals_reasoning = _INCLUDE_SEALED in (body.include or ())
        self._numbers = itertools.count()
        self._scores = TokenScores()
        self._text_logprobs: list[Entry] = []
        """Log-probabilities of the tokens in the latest item, if that is text."""
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": answer.body.model,
            # Encoded once: the values may be large, and as deeply nested as the encoder allows.
            **{
                name: Raw(msgspec.json.encode(value)) for name, value in echoed_fields(body).items()
            },
        }

    def begin(self, deltas: list[Delta]) -> bytes:
        """Return the events before the first token, each with the response so far."""
        kinds = ("response.created", "response.in_progress")
        response = self._response("in_progress")
        return self.encode_events([{"type": kind, "response": response} for kind in kinds])

    def end(self) -> bytes:
        """Return the last events of a complete answer, or of one that reached its maximum
        length."""
        events, status = self.close(), self._status
        last = {"type": f"response.{status}", "response": self._response(status)}
        return self.encode_events([*events, last])

    def error(self, problem: APIError) -> bytes:
        """Return the event that reports that the response failed."""
        code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
        failed = self._response("failed")
        failed["error"] = {"code": code, "message": problem.message}
        return self.encode_events([{"type": "response.failed", "response": failed}])

    def response(self) -> dict[str, Any]:
        """Return the complete response."""
        self.close()
        return self._response(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self.reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        is_final = status != "in_progress"
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": details,
            "output": list(self.blocks),
            "usage": self._usage() if is_final else None,
        }

    def _usage(self) -> dict[str, Any]:
        answer = self.answer
        prompt, output = answer.prompt_tokens, sum(answer.tokens_sent)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": prompt + output,
        }

    # -- items ----------------------------------------------------------------------------

    def encode_events(self, events: list[Event]) -> bytes:
        """Encode events as server-sent events, in bytes, each with a sequence number."""
        numbered = ({**event, "sequence_number": next(self._numbers)} for event in events)
        return b"".join(map(encode, numbered))

    def new_block(self, kind: str, call: dict[str, Any]) -> dict[str, Any]:
        """Return an empty output item. `kind` is "text", "thoughts" or "call". For a call, `call`
        contains its id and name."""
        item_type, prefix = _KINDS[kind]
        item_id = f"{prefix}_{uuid.uuid4().hex}"
        item: dict[str, Any] = {"id": item_id, "type": item_type, "status": "in_progress"}
        if kind == "text":
            return item | {"role": "assistant", "content": []}
        if kind == "thoughts":
            return item | {"summary": [], "content": []}
        namespace, name = self._tools.origin_by_name.get(call["name"], (None, call["name"]))
        call_item = item | {"call_id": call["id"], "name": name, "arguments": ""}
        return call_item | ({"namespace": namespace} if namespace is not None else {})

    def add_logprobs(self, entries: list[Entry]) -> None:
        """Store log-probabilities of tokens. Call this before the text of these tokens is added."""
        self._scores.push(entries)

    def open_events(self, kind: str) -> list[Event]:
        """Return the events that start the latest item and, unless it is a call, its only content
        part."""
        self._text_logprobs = []
        index = len(self.blocks) - 1
        item = dict(self.blocks[-1])
        added = {"type": "response.output_item.added", "output_index": index, "item": item}
        if kind == "call":
            return [added]
        return [added, self._event("content_part.added", content_index=0, part=_part(kind, ""))]

    def delta_events(self, kind: str, text: str) -> list[Event]:
        """Return the event that appends `text` to the latest item."""
        scores = self._scores.pop(text)
        if kind == "call":
            return [self._event("function_call_arguments.delta", delta=text)]
        if kind == "text":
            self._text_logprobs += scores
        return [self._text_event(kind, "delta", scores, delta=text)]

    def close_events(self, kind: str, text: str) -> list[Event]:
        """Store the complete text in the latest item, and return the events that end the item and
        its content part."""
        item = self.blocks[-1]
        is_cut = self.reason == "length" or (kind == "call" and parse_arguments(text) is None)
        item["status"] = "incomplete" if is_cut else "completed"
        if kind == "call":
            item["arguments"] = text
            name = item["name"]
            events = [self._event("function_call_arguments.done", arguments=text, name=name)]
        else:
            part = _part(kind, text, self._text_logprobs)
            item["content"] = [part]
            if kind == "thoughts":
                item["encrypted_content"] = seal(text) if self._seals_reasoning else None
            events = [
                self._text_event(kind, "done", self._text_logprobs, text=text),
                self._event("content_part.done", content_index=0, part=part),
            ]
        index = len(self.blocks) - 1
        done = {"type": "response.output_item.done", "output_index": index, "item": dict(item)}
        return [*events, done]

    def _text_event(self, kind: str, suffix: str, scores: list[Entry], **members: Any) -> Event:
        if kind == "text":
            members["logprobs"] = scores
            return self._event(f"output_text.{suffix}", content_index=0, **members)
        return self._event(f"reasoning_text.{suffix}", content_index=0, **members)

    def _event(self, kind: str, **members: Any) -> Event:
        """Return an event of type `response.{kind}` about the latest item. `members` are its other
        members."""
        location = {"output_index": len(self.blocks) - 1, "item_id": self.blocks[-1]["id"]}
        return {"type": f"response.{kind}", **location, **members}


def _part(kind: str, text: str, scores: Sequence[Entry] = ()) -> dict[str, Any]:
    if kind == "thoughts":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*scores]}


def echoed_fields(body: ResponsesRequest) -> dict[str, Any]:
    """Return the members of a response that repeat the request's fields, or their defaults."""
    text: dict[str, Any] = msgspec.to_builtins(body.text) if body.text is not None else {}
    text = {name: value for name, value in text.items() if value is not None}
    reasoning = body.reasoning
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_tool_members(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _tool_members(tool: ResponsesTool) -> dict[str, Any]:
    members: dict[str, Any] = msgspec.to_builtins(tool)
    return {name: value for name, value in members.items() if value is not None}
