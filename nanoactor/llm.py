"""`LLM`: the same engine for programs that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from nanoactor.engine import AsyncLLM, Prompt
from nanoactor.errors import EngineClosed, InvalidRequest
from nanoactor.outputs import RequestOutput, RequestOutputKind
from nanoactor.params import SamplingParams
from nanoactor.progress import Progress

T = TypeVar("T")


class LLM:
    """A blocking front: an event loop on a thread of its own, so it works inside one too.

    with LLM("demo") as llm:
        print(llm.generate("ROMEO:")[0].outputs[0].text)
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Start the engine; `options` are those of `EngineConfig`. Raises what `AsyncLLM` does."""
        self._llm = AsyncLLM(model, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="nanoactor-loop", daemon=True)
        self._thread.start()
        try:
            self._call(self._llm.start())
        except BaseException:
            self._stop_loop()
            raise

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            coroutine.close()
            raise EngineClosed("the engine was closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C too: nothing goes on computing unseen
            future.cancel()
            raise

    def __enter__(self) -> LLM:
        """It is started already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End all processes. A second call does nothing."""
        if not self._loop.is_closed():
            self._call(self._llm.close())
            self._stop_loop()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The completed outputs, in the order of the prompts.

        A prompt is text or a dict with `prompt` or `prompt_token_ids`; one set of parameters
        serves all, or there is one for each. The first invalid request raises, and ends the
        others. For conversations see `chat`.
        """
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        return self._call(self._generate(list(prompts), sampling_params, use_tqdm, None))

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one conversation (a list of messages) or to several."""
        if messages and isinstance(messages[0], Mapping):
            messages = [messages]
        coroutine = self._generate(list(messages), sampling_params, use_tqdm, chat_template_kwargs)
        return self._call(coroutine)

    async def _generate(
        self,
        prompts: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        template: Mapping[str, Any] | None,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(params)} sets of parameters")
        room = asyncio.Semaphore(self._llm.config.max_waiting_requests)
        progress = Progress(len(prompts), enabled=use_tqdm)

        async def one(prompt: Any, its: SamplingParams) -> RequestOutput:
            async with room:
                return await self._finish(prompt, its, progress, template)

        tasks = [asyncio.ensure_future(one(p, s)) for p, s in zip(prompts, params, strict=True)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            progress.close()

    async def _finish(
        self,
        prompt: Any,
        params: SamplingParams,
        progress: Progress,
        template: Mapping[str, Any] | None,
    ) -> RequestOutput:
        """The last output of a request; counts its tokens as they come."""
        told = 0
        final: RequestOutput | None = None
        stream = self._llm.generate(prompt, _cumulative(params), chat_template_kwargs=template)
        async for output in stream:
            final = output
            tokens = len(output.outputs[0].token_ids)
            progress.tokens(len(output.prompt_token_ids) if not told else 0, tokens - told)
            told = max(told, tokens)
        assert final is not None
        progress.request()
        return final


def _cumulative(params: SamplingParams) -> SamplingParams:
    if params.output_kind is RequestOutputKind.CUMULATIVE:
        return params
    raise InvalidRequest("LLM returns whole outputs: output_kind must be CUMULATIVE")
