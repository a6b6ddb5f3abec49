"""An answer of a completion route under way: its requests to the engine, and what they bring."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from nanoactor.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoactor.request import Request
from nanoactor.server.choices import Choice, Delta, TextChoice
from nanoactor.server.errors import unavailable
from nanoactor.server.logprobs import of_prompt
from nanoactor.server.requests import Body, ChatRequest, StreamOptions


@dataclasses.dataclass(frozen=True)
class Echoed:
    """Stands where a request to the engine does, for a prompt that is only sent back."""

    prompt_token_ids: Sequence[int]


class Answer:
    """One answer under way: its requests to the engine, and what they have brought."""

    def __init__(self, body: Body, requests: Sequence[Request | Echoed]) -> None:
        chat = isinstance(body, ChatRequest)
        self.streamed = body.stream
        self._prompt_most = body.prompt_logprobs
        options = body.stream_options or StreamOptions()
        self.tells_usage = options.include_usage
        self.tells_usage_always = options.include_usage and options.continuous_usage_stats
        self.requests = requests
        self.choices: Sequence[Choice] = ()
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        self.chunk_head = self.head | ({"object": "chat.completion.chunk"} if chat else {})
        self.cached = 0
        self._each = body.n or 1
        """Choices of each request."""
        self.prompt_logprobs: list[Any] | None = None
        """Of a conversation, which has one prompt."""
        self._said = [0] * (len(requests) * self._each)
        """Tokens of each choice."""
        self._times: dict[str, float] = {}

    def chunk(self, choices: list[Delta], usage: Any = None) -> bytes:
        """An event with new members of its choices."""
        value = {**self.chunk_head, "choices": choices}
        if self.tells_usage_always and choices:
            index = choices[0]["index"]
            request, said = self.requests[index // self._each], self._said[index]
            prompt = len(request.prompt_token_ids)
            usage = _usage(prompt, said)
        return event(value | {"usage": usage} if self.tells_usage else value)

    def said(self, number: int, completion: CompletionOutput) -> int:
        """Count the new tokens that the client is told."""
        choice = self.choices[number * self._each + completion.index]
        return 0 if choice.mute else len(completion.token_ids)

    def take(self, number: int, output: RequestOutput) -> list[Delta]:
        """Take what an output adds; raises `APIError` where it ends what should go on."""
        deltas: list[Delta] = []
        first = number * self._each
        if output.prompt_logprobs is not None:
            self._take_prompt(self.choices[first : first + self._each], output)
            for choice in self.choices[first : first + self._each]:
                deltas += choice.push_prompt(output)
        for completion in output.outputs:
            deltas += self._take_choice(first + completion.index, completion)
        if output.finished:
            self.cached += output.num_cached_tokens
            if len(self.choices) == 1:
                self._times = _times(output.metrics)
        return deltas

    def _take_prompt(self, choices: Sequence[Choice], output: RequestOutput) -> None:
        if output.prompt_logprobs is None or self._prompt_most is None:
            return
        told = of_prompt(output.prompt_token_ids, output.prompt_logprobs, self._prompt_most)
        for choice in choices:
            if isinstance(choice, TextChoice):
                choice.prompt_logprobs = told
            else:
                self.prompt_logprobs = told

    def _take_choice(self, index: int, completion: CompletionOutput) -> list[Delta]:
        choice, deltas = self.choices[index], []
        if not choice.mute:
            self._said[index] += len(completion.token_ids)
            if choice.logprobs is not None:
                choice.logprobs.add(completion)
            deltas += choice.push(completion.text)
        if completion.finish_reason == "abort":  # not by the client, who would have left
            raise unavailable("the server is shutting down; this answer is not complete")
        if completion.finish_reason is not None:
            deltas += choice.finish("length" if choice.mute else completion.finish_reason)
        return deltas

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; of one choice its times, too."""
        prompt = sum(len(request.prompt_token_ids) for request in self.requests)
        details = {"prompt_tokens_details": {"cached_tokens": self.cached}}
        return _usage(prompt, sum(self._said)) | details | self._times

    @property
    def note(self) -> str:
        """For the log."""
        usage = self.usage
        return f" {usage['prompt_tokens']}+{usage['completion_tokens']} tokens"

    def whole(self) -> dict[str, Any]:
        """All of it at once."""
        choices = [choice.whole() for choice in self.choices]
        prompt = {"prompt_logprobs": told} if (told := self.prompt_logprobs) is not None else {}
        return {**self.head, "choices": choices, **prompt, "usage": self.usage}


def event(value: Any) -> bytes:
    """Return a value as a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _times(metrics: RequestMetrics) -> dict[str, float]:
    """Return for how long a request waited, read its prompt and generated, in seconds.

    Under the names that Groq's API gives them; none where it has got no token.
    """
    began, first = metrics.first_scheduled_time, metrics.first_token_time
    if began is None or first is None:
        return {}
    return {
        "queue_time": began - metrics.arrival_time,
        "prompt_time": first - began,
        "completion_time": (metrics.last_token_time or first) - first,
    }
