"""State of an answer in progress, and the writers that encode answers in the format of an API."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from nanoactor.admission.request import Request
from nanoactor.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoactor.server.choices import Choice, Delta, TextChoice
from nanoactor.server.errors import APIError, unavailable
from nanoactor.server.logprobs import prompt_logprobs
from nanoactor.server.requests import Body, ChatRequest, StreamOptions


@dataclasses.dataclass(frozen=True)
class EchoedPrompt:
    """Stand-in for an engine request when the prompt is only echoed and nothing is generated."""

    prompt_token_ids: Sequence[int]


class Answer:
    """An answer in progress: its engine requests, and the choices built from their outputs."""

    def __init__(self, body: Body, requests: Sequence[Request | EchoedPrompt]) -> None:
        self.body = body
        self.is_streamed = body.stream
        self._num_prompt_logprobs = body.prompt_logprobs
        self.requests = requests
        self.choices: Sequence[Choice] = ()
        self.cached_tokens = 0
        self.choices_per_request = body.n or 1
        """Number of choices per prompt, which is the request's `n`."""
        self.prompt_logprobs: list[Any] | None = None
        """Prompt log-probabilities of a chat; None unless requested. A chat has only one prompt."""
        self.finish_reasons: list[str | None] = [None] * (len(requests) * self.choices_per_request)
        """Finish reason of each choice; None until the choice has finished."""
        self.tokens_sent = [0] * (len(requests) * self.choices_per_request)
        """Number of tokens sent to the client, by choice."""
        self.reasoning_tokens = 0
        """Estimated number of reasoning tokens among the tokens sent, based on the text."""
        self.stop_reason: int | str | None = None
        """What ended the choice that finished last: the stop string, or the id of the stop token.
        None if that choice ended for another reason."""
        self.phase_seconds: dict[str, float] = {}
        self.token_ids: list[list[int]] | None = None
        """Output token ids of each choice; None unless requested."""
        if body.return_token_ids:
            self.token_ids = [[] for _ in self.tokens_sent]
        self._unsent: list[list[int]] = [[] for _ in self.tokens_sent]
        """For each choice, the output token ids that no delta contains yet."""
        self.has_finished_request = False
        """True once one of the engine requests has finished. A chat has only one request."""

    def count_visible_tokens(self, number: int, completion: CompletionOutput) -> int:
        """Return the number of new tokens in `completion` that are sent to the client. `number` is
        the index of the engine request."""
        choice = self.choices[number * self.choices_per_request + completion.index]
        return 0 if choice.is_muted else len(completion.token_ids)

    def process(self, number: int, output: RequestOutput) -> list[Delta]:
        """Process an output of the engine request with index `number`, and return the deltas for
        the client. Raises `APIError` if the engine has aborted a choice."""
        deltas: list[Delta] = []
        first = number * self.choices_per_request
        if output.prompt_logprobs is not None:
            self._add_prompt_logprobs(
                self.choices[first : first + self.choices_per_request], output
            )
            for choice in self.choices[first : first + self.choices_per_request]:
                deltas += choice.push_prompt(output)
        for completion in output.outputs:
            deltas += self._process_choice(first + completion.index, completion)
        if output.finished:
            self.cached_tokens += output.num_cached_tokens
            self.has_finished_request = True
            if len(self.choices) == 1:
                self.phase_seconds = _phase_seconds(output.metrics)
        return deltas

    def _add_prompt_logprobs(self, choices: Sequence[Choice], output: RequestOutput) -> None:
        if output.prompt_logprobs is None or self._num_prompt_logprobs is None:
            return
        logprobs = prompt_logprobs(
            output.prompt_token_ids, output.prompt_logprobs, self._num_prompt_logprobs
        )
        for choice in choices:
            if isinstance(choice, TextChoice):
                choice.prompt_logprobs = logprobs
            else:
                self.prompt_logprobs = logprobs

    def _process_choice(self, index: int, completion: CompletionOutput) -> list[Delta]:
        choice, deltas = self.choices[index], []
        if not choice.is_muted:
            self.tokens_sent[index] += len(completion.token_ids)
            if choice.logprobs is not None:
                choice.logprobs.add(completion)
            deltas += choice.push(completion.text)
            self.reasoning_tokens += choice.reasoning_share(len(completion.token_ids))
            if self.token_ids is not None:
                self.token_ids[index] += completion.token_ids
                self._unsent[index] += completion.token_ids
        if completion.finish_reason == "abort":  # by the server: the client is still connected
            raise unavailable("the server is shutting down, so this answer is incomplete")
        if completion.finish_reason is not None:
            self.stop_reason = completion.stop_reason
            self.finish_reasons[index] = completion.finish_reason
            deltas += choice.finish("length" if choice.is_muted else completion.finish_reason)
        if self.token_ids is not None and deltas:
            self._attach_token_ids(index, deltas[0])
        return deltas

    def _attach_token_ids(self, index: int, delta: Delta) -> None:
        """Add the ids of all tokens since the previous delta to `delta`. In a text completion, the
        first delta also contains the prompt's token ids; in a chat, the first event contains them
        instead."""
        assert self.token_ids is not None
        if len(self.token_ids[index]) == len(self._unsent[index]) and not self.is_chat:
            delta["prompt_token_ids"] = [
                *self.requests[index // self.choices_per_request].prompt_token_ids
            ]
        delta["token_ids"], self._unsent[index] = self._unsent[index], []

    @property
    def is_chat(self) -> bool:
        """True if this is a chat completion."""
        return isinstance(self.body, ChatRequest)

    @property
    def prompt_tokens(self) -> int:
        """Total number of tokens in all prompts."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def log_note(self) -> str:
        """Numbers of prompt and output tokens, as text for the access log."""
        return f" {self.prompt_tokens}+{sum(self.tokens_sent)} tokens"


class AnswerWriter(Protocol):
    """Interface for writing an answer in the format of one API: as a stream of events, or as one
    response."""

    ping: bytes
    """An event without content that keeps a connection open. Empty if the API has no such event."""

    def begin(self, deltas: list[Delta]) -> bytes:
        """Return the first events of a stream, encoded. `deltas` are the initial deltas of all
        choices."""

    def push(self, deltas: list[Delta]) -> bytes:
        """Process deltas of a streamed answer, and return their events."""

    def collect(self, deltas: list[Delta]) -> None:
        """Process deltas of an answer that is not streamed."""

    def end(self) -> bytes:
        """Return the last events of a stream whose answer is complete."""

    def error(self, problem: APIError) -> bytes:
        """Return the last events of a stream that ends with an error."""

    def response(self) -> dict[str, Any]:
        """Return the response body. All deltas must have been passed to `collect`."""


class CompletionWriter:
    """Writes text completions and chat completions in OpenAI's format."""

    ping = b""

    def __init__(self, answer: Answer) -> None:
        body, self._respond = answer.body, answer
        chat = answer.is_chat
        options = body.stream_options or StreamOptions()
        self._includes_usage = options.include_usage
        self._includes_usage_always = options.include_usage and options.continuous_usage_stats
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        self._chunk_head = self._head | ({"object": "chat.completion.chunk"} if chat else {})

    def begin(self, deltas: list[Delta]) -> bytes:
        """Return the first events: the role of each choice in a chat, or the echoed prompts."""
        prompt = {}
        if self._respond.is_chat and self._respond.token_ids is not None:
            prompt["prompt_token_ids"] = [*self._respond.requests[0].prompt_token_ids]
        return b"".join([self._chunk([delta], **prompt) for delta in deltas])

    def push(self, deltas: list[Delta]) -> bytes:
        """Return one event per delta."""
        return b"".join([self._chunk([delta]) for delta in deltas])

    def collect(self, deltas: list[Delta]) -> None:
        """Do nothing, because the choices keep their own output."""

    def _chunk(self, choices: list[Delta], usage: Any = None, **extra_fields: Any) -> bytes:
        value = {**self._chunk_head, "choices": choices, **extra_fields}
        if self._includes_usage_always and choices:
            answer, index = self._respond, choices[0]["index"]
            request = answer.requests[index // answer.choices_per_request]
            usage = _usage(len(request.prompt_token_ids), answer.tokens_sent[index])
        return event(value | {"usage": usage} if self._includes_usage else value)

    def end(self) -> bytes:
        """Return the usage event, if the client requested it, and the `[DONE]` event."""
        usage = self._chunk([], self._usage()) if self._includes_usage else b""
        return usage + _DONE

    def error(self, problem: APIError) -> bytes:
        """Return the error event. It replaces the `[DONE]` event."""
        return event(problem.body)

    def _usage(self) -> dict[str, Any]:
        """Return the total token counts of all choices. If there is only one choice, add the
        seconds that it spent in the queue, in prefill and in decode."""
        answer = self._respond
        details: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": answer.cached_tokens}}
        if answer.is_chat:
            details["completion_tokens_details"] = {"reasoning_tokens": answer.reasoning_tokens}
        return (
            _usage(answer.prompt_tokens, sum(answer.tokens_sent)) | details | answer.phase_seconds
        )

    def response(self) -> dict[str, Any]:
        """Return the response body with all choices and the usage."""
        answer = self._respond
        choices = [choice.complete() for choice in answer.choices]
        prompt: dict[str, Any] = {}
        if answer.prompt_logprobs is not None:
            prompt["prompt_logprobs"] = answer.prompt_logprobs
        for index, ids in enumerate(answer.token_ids or ()):
            choices[index]["token_ids"] = ids
            prompt_ids = [*answer.requests[index // answer.choices_per_request].prompt_token_ids]
            (prompt if answer.is_chat else choices[index])["prompt_token_ids"] = prompt_ids
        return {**self._head, "choices": choices, **prompt, "usage": self._usage()}


_DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Encode a value as JSON in a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _phase_seconds(metrics: RequestMetrics) -> dict[str, float]:
    """Return the seconds that a request spent waiting, in prefill and in decode, by field name.

    The names are those of Groq's API. The result is empty if the request has no output token.
    """
    first_step, first_token = metrics.first_scheduled_time, metrics.first_token_time
    if first_step is None or first_token is None:
        return {}
    return {
        "queue_time": first_step - metrics.arrival_time,
        "prompt_time": first_token - first_step,
        "completion_time": (metrics.last_token_time or first_token) - first_token,
    }
