"""Batches of requests for `LLM`: all requests of one call, which run at the same time."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from nanoactor.api.engine import AsyncLLM
from nanoactor.api.progress import Progress
from nanoactor.errors import EngineOverloaded, InvalidRequest
from nanoactor.requests.outputs import RequestOutput, RequestOutputKind
from nanoactor.requests.params import SamplingParams
from nanoactor.runtime.concurrency import run_all

T = TypeVar("T")


class Batches:
    """Runner of the batches of an `LLM`. It starts all requests of a batch, shows a progress bar,
    and returns the complete results in order. A batch may be larger than the engine's queue. The
    methods must be called on the engine's event loop."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def generate(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        template: Mapping[str, Any] | None,
    ) -> list[RequestOutput]:
        """Return the finished outputs in the order of the prompts. `params` is one object for all
        prompts, or a list with one for each; None selects the model's defaults. `template` contains
        the variables for the chat template. `use_tqdm` shows the progress bar, with token counts.

        Raises `InvalidRequest` if `params` does not fit. The first invalid request raises its error
        and aborts the others.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams.for_model()] * len(prompts)
        is_list = is_sequence(params) and not isinstance(params, str)
        if not is_list or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidRequest(
                "sampling_params must be a SamplingParams object, or a list with one for each "
                f"prompt, got {params!r:.100}"
            )
        if len(params) != len(prompts):
            raise InvalidRequest(
                "sampling_params must have one item for each prompt, but there are "
                f"{len(prompts)} prompts and {len(params)} items"
            )
        progress = Progress(len(prompts), enabled=use_tqdm)
        try:
            return await run_all(
                [
                    functools.partial(
                        self._retry_while_full,
                        functools.partial(self._finish, prompt, prompt_params, progress, template),
                    )
                    for prompt, prompt_params in zip(prompts, params, strict=True)
                ]
            )
        finally:
            progress.close()

    async def run(
        self,
        calls: Sequence[Callable[[], Awaitable[T]]],
        use_tqdm: bool,
        max_concurrent: int | None,
    ) -> list[T]:
        """Make all calls of the engine, at most `max_concurrent` (None: all) at a time, and return
        their results in order. The first error ends the other calls. `use_tqdm` shows the progress
        bar."""
        progress = Progress(len(calls), enabled=use_tqdm)

        async def run(call: Callable[[], Awaitable[T]]) -> T:
            output = await self._retry_while_full(call)
            progress.count_finished()
            return output

        try:
            return await run_all([functools.partial(run, call) for call in calls], max_concurrent)
        finally:
            progress.close()

    async def _retry_while_full(self, make: Callable[[], Awaitable[T]]) -> T:
        """Run a request. If the queue is full, wait and try again, because a batch may be larger
        than the queue."""
        while True:
            try:
                return await make()
            except EngineOverloaded:
                await self._llm.wait_for_capacity()

    async def _finish(
        self,
        prompt: Any,
        params: SamplingParams,
        progress: Progress,
        template: Mapping[str, Any] | None,
    ) -> RequestOutput:
        """Run a request to its end and return its last output. Report tokens to `progress` as they
        arrive."""
        counted = 0
        final: RequestOutput | None = None
        stream = self._llm.generate(
            prompt, _require_cumulative(params), chat_template_kwargs=template
        )
        async for output in stream:
            final = output
            tokens = sum(len(answer.token_ids) for answer in output.outputs)
            progress.add_tokens(
                len(output.prompt_token_ids) if not counted else 0, tokens - counted
            )
            counted = max(counted, tokens)
        assert final is not None
        progress.count_finished()
        return final


def is_sequence(value: object) -> bool:
    """Return True for a sequence. Unlike `isinstance`, it does not narrow the type that mypy
    infers, so that mypy accepts checks of values that violate their declared type."""
    return isinstance(value, Sequence)


def _require_cumulative(params: SamplingParams) -> SamplingParams:
    if params.output_kind is RequestOutputKind.CUMULATIVE:
        return params
    raise InvalidRequest(
        "output_kind must be CUMULATIVE, because LLM returns only complete outputs"
    )
