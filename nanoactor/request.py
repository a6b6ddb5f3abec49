"""A request under way, for those who want to know more than its iterator tells."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from nanoactor.actors.journal import Entry
from nanoactor.errors import RequestAborted
from nanoactor.outputs import Logprobs, RequestMetrics, RequestOutput
from nanoactor.params import DefaultTokens
from nanoactor.pooling.messages import Float32

log = logging.getLogger("nanoactor.engine")

_WARNED: list[str] = []
"""The request of which it was said that its output had a default length."""


class Journal(Protocol):
    """Whoever keeps a request's page: an engine's frontend, or the ingress of several engines."""

    def abort(self, entry: Entry) -> None:
        """Nobody reads it any more."""

    def go_on(self, entry: Entry, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Say what its held answers go on with."""


class Request:
    """From `AsyncLLM.submit`: an async iterator of outputs. Whoever does not read it to its end
    closes it."""

    def __init__(self, frontend: Journal, entry: Entry, engine: object) -> None:
        """`engine` lives as long as its requests do."""
        self._engine = engine
        self._frontend = frontend
        self._entry = entry
        self._read = False

    @property
    def request_id(self) -> str:
        """Its name, as its caller or the engine has given it."""
        return self._entry.request_id

    @property
    def cached_tokens(self) -> int:
        """Return the number of prompt tokens found in the prefix cache; known at the end."""
        terminal = self._entry.answers[0].terminal
        return terminal.cached_tokens if terminal else 0

    @property
    def metrics(self) -> RequestMetrics:
        """The times of the request's events."""
        return self._entry.metrics

    def metrics_of(self, index: int) -> RequestMetrics:
        """The times of one of several answers."""
        return self._entry.answers[index].metrics

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt; of a text only once it is accepted."""
        return self._entry.prompt_token_ids

    async def accepted(self) -> None:
        """Wait until the request is tokenized and queued; raises what refuses it."""
        await self._entry.accepted.wait()
        self._entry.raise_error()

    async def begun(self) -> None:
        """Wait until there is an output to read; raises what keeps the request from having one, a
        grammar that cannot be compiled, say."""
        await self._entry.news()
        self._entry.raise_error()

    def __aiter__(self) -> Request:
        """It is its own iterator."""
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output; the errors are those of `AsyncLLM.generate`."""
        if self._read:
            raise StopAsyncIteration
        output = await self._entry.next()
        self._read = output.finished
        if output.finished:
            self._warn_of_default(output)
        return output

    def _warn_of_default(self, output: RequestOutput) -> None:
        """Log once that an output ended by a `max_tokens` that its user did not write."""
        most = self._entry.submit.spec.stopping.max_tokens
        cut = any(answer.finish_reason == "length" for answer in output.outputs)
        if cut and isinstance(most, DefaultTokens) and not _WARNED:
            _WARNED.append(self._entry.request_id)
            log.warning(
                "request %s has ended after %d tokens: that is max_tokens where "
                "SamplingParams(...) does not give it, as in vLLM; None is as many as fit (said "
                "once)",
                self._entry.request_id,
                most,
            )

    async def held(self) -> list[Logprobs]:
        """Wait until all answers are held; return of each what is likely to follow it. Raises the
        error that ended the request."""
        await self._entry.held()
        return [answer.logprobs[-1] for answer in self._entry.answers if answer.logprobs]

    async def vector(self) -> Float32:
        """Wait for the vector that answers a request that pools, as the device has brought it.
        Raises what ended the request instead, `RequestAborted` after an abort."""
        await self._entry.ended.wait()
        self._entry.raise_error()
        if (vector := self._entry.answers[0].vector) is None:
            raise RequestAborted(f"request {self.request_id} was aborted")
        return vector

    @property
    def vector_so_far(self) -> Float32 | None:
        """The same, if it is there."""
        return self._entry.answers[0].vector

    def go_on(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Resume the paused sequences: each becomes a copy of its parent, or stays itself, and
        continues with its token; those with parent -1 end. Raises the errors of `held`, and
        `InvalidRequest`."""
        self._frontend.go_on(self._entry, parents, tokens)

    def close(self) -> None:
        """Abort it, unless it is over."""
        if not self._entry.over:
            self._frontend.abort(self._entry)
