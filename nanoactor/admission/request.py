"""A running request as its caller sees it: output, prompt, metrics and paused sequences."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from nanoactor.errors import RequestAborted
from nanoactor.messages.pooling import Float32
from nanoactor.recovery.journal import Entry
from nanoactor.requests.outputs import Logprobs, RequestMetrics, RequestOutput
from nanoactor.requests.params import DefaultTokens

log = logging.getLogger("nanoactor.engine")

_WARNED: list[str] = []
"""Id of the request for which the warning about the default `max_tokens` was logged; empty until
then."""


class RequestOwner(Protocol):
    """The owner of a request's journal entry (the record of its output so far): the frontend of an
    engine, or the ingress in front of several engines."""

    def abort(self, entry: Entry) -> None:
        """Abort a request whose caller no longer reads its output."""

    def resume_held(self, entry: Entry, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Resume the paused sequences of a request; the arguments are those of
        `Request.resume_held`."""


class Request:
    """A request returned by `AsyncLLM.submit`: an async iterator of outputs. Unless all outputs are
    read, `close` must be called."""

    def __init__(self, frontend: RequestOwner, entry: Entry, engine: object) -> None:
        """`engine` is only referenced, to keep it alive as long as the request."""
        self._engine = engine
        self._frontend = frontend
        self._entry = entry
        self._is_exhausted = False

    @property
    def request_id(self) -> str:
        """The request's id, chosen by the caller or else by the engine."""
        return self._entry.request_id

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache; 0 until the first sequence has
        ended."""
        terminal = self._entry.answers[0].terminal
        return terminal.cached_tokens if terminal else 0

    @property
    def metrics(self) -> RequestMetrics:
        """Times of the request's events: arrival, start, first and last token, and end."""
        return self._entry.metrics

    def metrics_of(self, index: int) -> RequestMetrics:
        """Return the times of the events of one sequence; `index` counts the request's sequences
        from 0."""
        return self._entry.answers[index].metrics

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt. For a text prompt, they are available once `accepted` has
        returned."""
        return self._entry.prompt_token_ids

    async def accepted(self) -> None:
        """Wait until the request is tokenized and queued. Raises the error if it is rejected."""
        await self._entry.accepted.wait()
        self._entry.raise_error()

    async def wait_for_output(self) -> None:
        """Wait until there is output to read, without reading it. Raises the error that ended the
        request, for example if its grammar cannot be compiled."""
        await self._entry.wait_for_news()
        self._entry.raise_error()

    def __aiter__(self) -> Request:
        """Return the request, which is its own iterator."""
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for the next output and return it. Raises the same errors as `AsyncLLM.generate`."""
        if self._is_exhausted:
            raise StopAsyncIteration
        output = await self._entry.next()
        self._is_exhausted = output.finished
        if output.finished:
            self._warn_if_default_cut(output)
        return output

    def _warn_if_default_cut(self, output: RequestOutput) -> None:
        """Log a warning if the default of `max_tokens` cut off an output. Logs only once per
        process."""
        max_tokens = self._entry.submit.spec.stopping.max_tokens
        was_cut = any(answer.finish_reason == "length" for answer in output.outputs)
        if was_cut and isinstance(max_tokens, DefaultTokens) and not _WARNED:
            _WARNED.append(self._entry.request_id)
            log.warning(
                "request %s ended after %d tokens, the default of max_tokens, as in vLLM; set "
                "max_tokens=None to allow as many tokens as fit (logged once)",
                self._entry.request_id,
                max_tokens,
            )

    async def held(self) -> list[Logprobs]:
        """Wait until all sequences are paused. Return, for each sequence, the log-probabilities of
        its most likely next tokens. Raises the error that ended the request."""
        await self._entry.wait_until_held()
        return [answer.logprobs[-1] for answer in self._entry.answers if answer.logprobs]

    async def vector(self) -> Float32:
        """Wait for the result of a pooling request and return it as the device computed it
        (float32). Raises the error that ended the request, or `RequestAborted` if it was
        aborted."""
        await self._entry.ended.wait()
        self._entry.raise_error()
        if (vector := self._entry.answers[0].vector) is None:
            raise RequestAborted(f"request {self.request_id} was aborted")
        return vector

    @property
    def vector_so_far(self) -> Float32 | None:
        """The result of a pooling request (float32); None if it has not arrived yet."""
        return self._entry.answers[0].vector

    def resume_held(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Resume the paused sequences of the request. Sequence i becomes a copy of sequence
        `parents[i]`, possibly itself, and continues with token id `tokens[i]`; if `parents[i]` is
        -1, it ends. Raises the same errors as `held`, and `InvalidRequest` if the request cannot be
        resumed."""
        self._frontend.resume_held(self._entry, parents, tokens)

    def close(self) -> None:
        """Abort the request unless it has finished."""
        if not self._entry.is_over:
            self._frontend.abort(self._entry)
