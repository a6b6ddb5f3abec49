"""A running request, with more details than its output iterator gives."""

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
"""Id of the request for which the warning was logged; at most one."""


class RequestOwner(Protocol):
    """The owner of a request's journal entry: an engine's frontend, or an ingress of several
    engines."""

    def abort(self, entry: Entry) -> None:
        """Abort a request that is no longer read."""

    def resume_held(self, entry: Entry, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Resume a request's paused sequences with these parents and tokens."""


class Request:
    """A request from `AsyncLLM.submit`: an async iterator of outputs. Close it unless it is read to
    the end."""

    def __init__(self, frontend: RequestOwner, entry: Entry, engine: object) -> None:
        """`engine` is kept alive as long as the request."""
        self._engine = engine
        self._frontend = frontend
        self._entry = entry
        self._is_exhausted = False

    @property
    def request_id(self) -> str:
        """Return the request's id, chosen by the caller or the engine."""
        return self._entry.request_id

    @property
    def cached_tokens(self) -> int:
        """Return the number of prompt tokens found in the prefix cache; 0 until the first sequence
        has ended."""
        terminal = self._entry.answers[0].terminal
        return terminal.cached_tokens if terminal else 0

    @property
    def metrics(self) -> RequestMetrics:
        """Return the times of the request's events."""
        return self._entry.metrics

    def metrics_of(self, index: int) -> RequestMetrics:
        """Return the times of the events of sequence `index`."""
        return self._entry.answers[index].metrics

    @property
    def prompt_token_ids(self) -> list[int]:
        """Return the prompt's token ids; those of a text prompt are known once the request is
        accepted."""
        return self._entry.prompt_token_ids

    async def accepted(self) -> None:
        """Wait until the request is tokenized and queued. Raises the error that rejects it."""
        await self._entry.accepted.wait()
        self._entry.raise_error()

    async def wait_for_output(self) -> None:
        """Wait until there is an output to read. Raises the error that ended the request, for
        example if its grammar cannot be compiled."""
        await self._entry.wait_for_news()
        self._entry.raise_error()

    def __aiter__(self) -> Request:
        """Return the request, which is its own iterator."""
        return self

    async def __anext__(self) -> RequestOutput:
        """Return the next output. Raises the errors of `AsyncLLM.generate`."""
        if self._is_exhausted:
            raise StopAsyncIteration
        output = await self._entry.next()
        self._is_exhausted = output.finished
        if output.finished:
            self._warn_if_default_cut(output)
        return output

    def _warn_if_default_cut(self, output: RequestOutput) -> None:
        """Log a warning, only once, if an output was cut off by the default of `max_tokens`."""
        max_tokens = self._entry.submit.spec.stopping.max_tokens
        was_cut = any(answer.finish_reason == "length" for answer in output.outputs)
        if was_cut and isinstance(max_tokens, DefaultTokens) and not _WARNED:
            _WARNED.append(self._entry.request_id)
            log.warning(
                "request %s ended after %d tokens, which is the default max_tokens, as in vLLM; "
                "max_tokens=None allows as many tokens as fit (logged once)",
                self._entry.request_id,
                max_tokens,
            )

    async def held(self) -> list[Logprobs]:
        """Wait until all sequences are paused; return the log-probabilities of the likely next
        tokens of each sequence. Raises the error that ended the request."""
        await self._entry.wait_until_held()
        return [answer.logprobs[-1] for answer in self._entry.answers if answer.logprobs]

    async def vector(self) -> Float32:
        """Wait for the result of a pooling request, as the device returned it. Raises the error
        that ended the request, or `RequestAborted` if it was aborted."""
        await self._entry.ended.wait()
        self._entry.raise_error()
        if (vector := self._entry.answers[0].vector) is None:
            raise RequestAborted(f"request {self.request_id} was aborted")
        return vector

    @property
    def vector_so_far(self) -> Float32 | None:
        """Return the result of a pooling request without waiting; None if it has not arrived."""
        return self._entry.answers[0].vector

    def resume_held(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Resume the paused sequences. Sequence i becomes a copy of sequence `parents[i]`, which
        may be itself, and continues with `tokens[i]`; if its parent is -1, it ends. Raises the
        errors of `held`, and `InvalidRequest` if the request cannot resume."""
        self._frontend.resume_held(self._entry, parents, tokens)

    def close(self) -> None:
        """Abort the request unless it is finished."""
        if not self._entry.is_over:
            self._frontend.abort(self._entry)
