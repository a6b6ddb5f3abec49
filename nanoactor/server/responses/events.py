"""Answers in the shapes of the Responses API: a chat's deltas as events, and as one response."""

from __future__ import annotations

import itertools
import time
import uuid
from typing import Any

import msgspec

from nanoactor.server.answer import Answer
from nanoactor.server.choices import Delta
from nanoactor.server.errors import APIError
from nanoactor.server.responses.request import ResponsesRequest, ResponsesTool
from nanoactor.server.responses.translate import Tools
from nanoactor.server.sealed import seal

Event = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_SEALED = "reasoning.encrypted_content"


def encode(event: Event) -> bytes:
    """Return an event as it goes over the wire."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class ResponsesWriter:
    """Writes one answer."""

    def __init__(self, answer: Answer, body: ResponsesRequest, tools: Tools) -> None:
        self._answer, self._tools = answer, tools
        self._seals = _SEALED in (body.include or ())
        self._numbers = itertools.count()
        self._output: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Pieces of the last item's text, thoughts or arguments."""
        self._open = False
        self._reason: str | None = None
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": answer.body.model,
            **_echoed(body),
        }

    # -- a stream -------------------------------------------------------------------------

    def begin(self, deltas: list[Delta]) -> bytes:
        """Return the events before the first token."""
        kinds = ("response.created", "response.in_progress")
        return self._encoded(
            [{"type": k, "response": self._response("in_progress")} for k in kinds]
        )

    def push(self, deltas: list[Delta]) -> bytes:
        """Return the events of what is new."""
        return self._encoded(self._events(deltas))

    def end(self) -> bytes:
        """Return the events of an answer that is complete, or was cut at its greatest length."""
        events = self._close()
        status = self._status
        events.append({"type": f"response.{status}", "response": self._response(status)})
        return self._encoded(events)

    def error(self, problem: APIError) -> bytes:
        """Return the event of a response that has failed."""
        code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
        failed = self._response("failed")
        failed["error"] = {"code": code, "message": problem.message}
        return self._encoded([{"type": "response.failed", "response": failed}])

    def _encoded(self, events: list[Event]) -> bytes:
        numbered = ({**event, "sequence_number": next(self._numbers)} for event in events)
        return b"".join([encode(event) for event in numbered])

    # -- a whole --------------------------------------------------------------------------

    def take(self, deltas: list[Delta]) -> None:
        """Keep what is new."""
        self._events(deltas)

    def whole(self) -> dict[str, Any]:
        """Return the response."""
        self._close()
        return self._response(self._status)

    # -- both -----------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        is_over = status != "in_progress"
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": details,
            "output": list(self._output),
            "usage": self._usage() if is_over else None,
        }

    def _usage(self) -> dict[str, Any]:
        answer = self._answer
        prompt, told = answer.prompt_tokens, sum(answer.told)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": answer.cached},
            "output_tokens": told,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning},
            "total_tokens": prompt + told,
        }

    def _events(self, deltas: list[Delta]) -> list[Event]:
        events: list[Event] = []
        for one in deltas:
            self._reason = one["finish_reason"] or self._reason
            delta = one["delta"]
            if thoughts := delta.get("reasoning_content"):
                self._add("reasoning", thoughts, events)
            if text := delta.get("content"):
                self._add("message", text, events)
            for call in delta.get("tool_calls", ()):
                self._call(call, events)
        return events

    def _call(self, call: dict[str, Any], events: list[Event]) -> None:
        function = call["function"]
        if "id" in call:
            events += self._close()
            namespace, name = self._tools.origins.get(function["name"], (None, function["name"]))
            item = {"call_id": call["id"], "name": name, "arguments": ""}
            if namespace is not None:
                item["namespace"] = namespace
            self._begin("function_call", item, events)
        if arguments := function["arguments"]:
            self._texts.append(arguments)
            events.append(self._event("function_call_arguments.delta", delta=arguments))

    def _add(self, kind: str, text: str, events: list[Event]) -> None:
        """Add text to an item of this kind, which is begun unless it is open."""
        if not self._open or self._output[-1]["type"] != kind:
            events += self._close()
            if kind == "message":
                self._begin(kind, {"role": "assistant", "content": []}, events)
                part: Any = _output_text("")
                events.append(self._event("content_part.added", content_index=0, part=part))
            else:
                self._begin(kind, {"summary": [], "content": []}, events)
                part = {"type": "reasoning_text", "text": ""}
                events.append(self._event("content_part.added", content_index=0, part=part))
        self._texts.append(text)
        if kind == "message":
            told = self._event("output_text.delta", content_index=0, delta=text, logprobs=[])
        else:
            told = self._event("reasoning_text.delta", content_index=0, delta=text)
        events.append(told)

    def _begin(self, kind: str, members: dict[str, Any], events: list[Event]) -> None:
        ident = f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
        item = {"id": ident, "type": kind, "status": "in_progress", **members}
        self._output.append(item)
        self._open, self._texts = True, []
        index = len(self._output) - 1
        events.append(
            {"type": "response.output_item.added", "output_index": index, "item": dict(item)}
        )

    def _event(self, kind: str, **members: Any) -> Event:
        """Return an event of the last item."""
        place = {"output_index": len(self._output) - 1, "item_id": self._output[-1]["id"]}
        return {"type": f"response.{kind}", **place, **members}

    def _close(self) -> list[Event]:
        """End the item that is open, if one is, with what it has become."""
        if not self._open:
            return []
        self._open, item, text = False, self._output[-1], "".join(self._texts)
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        events: list[Event] = []
        match item["type"]:
            case "message":
                part = _output_text(text)
                item["content"] = [part]
                done = self._event("output_text.done", content_index=0, text=text, logprobs=[])
                events = [done, self._event("content_part.done", content_index=0, part=part)]
            case "reasoning":
                part = {"type": "reasoning_text", "text": text}
                item["content"] = [part]
                item["encrypted_content"] = seal(text) if self._seals else None
                done = self._event("reasoning_text.done", content_index=0, text=text)
                events = [done, self._event("content_part.done", content_index=0, part=part)]
            case _:
                item["arguments"] = text
                name = item["name"]
                events = [self._event("function_call_arguments.done", arguments=text, name=name)]
        index = len(self._output) - 1
        done = {"type": "response.output_item.done", "output_index": index, "item": dict(item)}
        return [*events, done]


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _echoed(body: ResponsesRequest) -> dict[str, Any]:
    """Return the members of a response that repeat its request."""
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
        "tools": [_shown(tool) for tool in body.tools or ()],
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _shown(tool: ResponsesTool) -> dict[str, Any]:
    members: dict[str, Any] = msgspec.to_builtins(tool)
    return {name: value for name, value in members.items() if value is not None}
