"""`LLM`: the engine's synchronous interface."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from nanoactor.api.batches import Batches, is_sequence
from nanoactor.api.engine import AsyncLLM, Prompt
from nanoactor.errors import (
    EngineClosed,
    InvalidRequest,
    NotUsableHere,
    public,
)
from nanoactor.requests.outputs import BeamSearchOutput, RequestOutput
from nanoactor.requests.params import BeamSearchParams, SamplingParams
from nanoactor.requests.pooling_outputs import EmbeddingRequestOutput, ScoringRequestOutput
from nanoactor.requests.pooling_params import PoolingParams

if TYPE_CHECKING:
    from nanoactor.text.huggingface import PreTrainedTokenizerBase

T = TypeVar("T")
_MAX_CONCURRENT_TEXTS = 4096
"""Maximum number of texts in flight in one call of `embed` or `score`."""


class LLM:
    """A blocking interface to the engine, which runs its own event loop on a thread. It can also be
    used while another event loop is running, as in notebooks.

    Use it in a `with` statement, or call `close`:

        with LLM("demo") as llm:
            print(llm.generate("ROMEO:")[0].outputs[0].text)
    """

    @public
    def __init__(self, model: str, **options: Any) -> None:
        """Start the engine. `options` are the fields of `EngineConfig`. Raises the errors of
        `AsyncLLM`."""
        self._llm = AsyncLLM(model, **options)
        self._batches = Batches(self._llm)
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        # The thread must not keep alive an engine that its user has dropped.
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop,), name="nanoactor-loop", daemon=True
        )
        self._thread.start()
        try:
            self._call(self._llm.start())
        except BaseException:  # also on Ctrl-C: end what has been started
            self.close()
            raise

    def __del__(self) -> None:
        """End the processes of an engine that was not closed, and emit a `ResourceWarning`."""
        if self.__dict__.get("_closed") is not False or sys.is_finalizing():
            return
        if os.getpid() != self._pid:
            return
        self._closed = True
        ending = _close_dropped(self._llm, self._loop)
        try:
            asyncio.run_coroutine_threadsafe(ending, self._loop)
        except RuntimeError:  # the loop is closed
            ending.close()
        # Last, because the warning may raise.
        warnings.warn(
            f"the engine of {self._llm.config.model!r} was not closed; use `with`, or call close()",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._check_usable()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except BaseException:
            coroutine.close()
            raise
        try:
            return future.result()
        except BaseException:  # also on Ctrl-C: leave no request running
            future.cancel()
            raise

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise NotUsableHere(
                "the engine was started in another process; start it after the fork, not before"
            )
        if self._closed:
            raise EngineClosed("the engine was closed")

    def __enter__(self) -> LLM:
        """Return the engine. The constructor has already started it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the engine."""
        self.close()

    @public
    def close(self) -> None:
        """End all processes, and return once they have ended. Unfinished requests raise
        `EngineClosed`. May be called repeatedly, and from several threads."""
        if os.getpid() != self._pid:
            return
        with self._closing:
            if not self._closed:
                self._closed = True
                asyncio.run_coroutine_threadsafe(self._close_and_cancel(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()

    async def _close_and_cancel(self) -> None:
        """Close the engine, and then cancel calls that are still running and wait for them."""
        await self._llm.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    @public
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the finished outputs in the order of the prompts.

        A prompt is a text, or a dict with `prompt` or `prompt_token_ids`. For conversations, use
        `chat`. `sampling_params` is one object for all prompts, or a list with one for each prompt.
        The first invalid request raises its error and aborts the others.
        """
        prompt_list = _as_list(prompts, "prompts", "a string, a dict, or a list of them")
        return self._call(self._batches.generate(prompt_list, sampling_params, use_tqdm, None))

    @public
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Return the outputs for one conversation (a list of messages) or for several, in order.

        `add_generation_prompt`, `continue_final_message` and `tools` are passed to the chat
        template. Values in `chat_template_kwargs` override them.
        """
        prompt_list = _as_list(messages, "messages", "a list of messages, or a list of such lists")
        if prompt_list and isinstance(prompt_list[0], Mapping):
            prompt_list = [prompt_list]
        if tools is not None and (isinstance(tools, str | Mapping) or not is_sequence(tools)):
            raise InvalidRequest(f"tools must be a list of functions, got {tools!r:.100}")
        given = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": list(tools) if tools else None,
        }
        options: Any = {} if chat_template_kwargs is None else chat_template_kwargs
        if isinstance(options, Mapping):  # anything else is rejected when requests are checked
            options = {k: value for k, value in given.items() if value is not None} | {**options}
        return self._call(self._batches.generate(prompt_list, sampling_params, use_tqdm, options))

    @public
    def generate_multimodal(
        self,
        requests: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the finished outputs of requests with images and videos, in the order of the
        requests.

        A request is either `{"text": ..., "images": [...], "videos": [...]}`, with a placeholder in
        the text for each image and video, or `{"messages": [...]}`, with images and videos as
        content parts. Raises `InvalidRequest` for any other form.
        """
        prompt_list = _as_list(requests, "requests", "a list of dicts")
        prompts = [_multimodal(request) for request in prompt_list]
        return self._call(self._batches.generate(prompts, sampling_params, use_tqdm, None))

    @public
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest continuations found for each prompt, as `AsyncLLM.beam_search` does.

        At most `concurrency_limit` searches run at once; None sets no limit. The first invalid
        prompt raises its error and ends the other searches.
        """
        prompt_list = _as_list(prompts, "prompts", "a string, a dict, or a list of them")
        limit = concurrency_limit
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise InvalidRequest(
                f"concurrency_limit must be an integer of at least 1, got {limit!r}"
            )
        calls = [functools.partial(self._llm.beam_search, one, params) for one in prompt_list]
        return self._call(self._batches.run(calls, use_tqdm, limit))

    @public
    def embed(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding vectors of one or more texts, in order, as `AsyncLLM.embed` does.

        The first invalid text raises its error and aborts the others.
        """
        prompt_list = _as_list(prompts, "prompts", "a string, a dict, or a list of them")
        calls = [functools.partial(self._llm.embed, one, pooling_params) for one in prompt_list]
        return self._call(self._batches.run(calls, use_tqdm, _MAX_CONCURRENT_TEXTS))

    @public
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return a score for each document: how well it matches its query, as in `AsyncLLM.score`.
        `queries` is one query for all documents, or one for each. Raises `InvalidRequest` for any
        other number."""
        query_list = _as_list(queries, "queries", "a text, or a list of them")
        document_list = _as_list(documents, "documents", "a text, or a list of them")
        if len(query_list) == 1:
            query_list *= len(document_list)
        if len(query_list) != len(document_list):
            raise InvalidRequest(
                f"queries must be one query or one for each document, got {len(query_list)} "
                f"queries and {len(document_list)} documents"
            )
        score_pair = functools.partial(
            self._llm.score, instruction=instruction, pooling_params=pooling_params
        )
        calls = [
            functools.partial(score_pair, *pair)
            for pair in zip(query_list, document_list, strict=True)
        ]
        return self._call(self._batches.run(calls, use_tqdm, _MAX_CONCURRENT_TEXTS))

    @public
    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters of requests: the values that the model
        recommends."""
        return SamplingParams.for_model()

    @public
    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer as transformers loads it, the same object each time."""
        return self._call(self._llm.get_tokenizer())


def _as_list(given: Any, name: str, what: str) -> list[Any]:
    """Return a sequence as a list, and a single item as a list of one. Raises `InvalidRequest` for
    other types. `what` describes the allowed types in the error."""
    if isinstance(given, str | Mapping):
        return [given]
    if isinstance(given, bytes) or not is_sequence(given):
        raise InvalidRequest(f"{name} must be {what}, got {given!r:.100}")
    return list(given)


def _multimodal(request: Mapping[str, Any]) -> Any:
    """Convert a request of `generate_multimodal` to a prompt of `generate`."""
    keys = set(request) if isinstance(request, Mapping) else set()
    if keys == {"messages"}:
        return request["messages"]
    if not {"text"} <= keys <= {"text", "images", "videos"}:
        raise InvalidRequest(
            "a request must be a dict with 'text' and optionally 'images' and 'videos', or "
            f"with only 'messages', got {sorted(map(str, keys)) or type(request).__name__}"
        )
    given = {"image": request.get("images"), "video": request.get("videos")}
    data = {kind: items for kind, items in given.items() if items is not None}
    prompt = {"prompt": request["text"]}
    return {**prompt, "multi_modal_data": data} if data else prompt


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


async def _close_dropped(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    try:
        await llm.close()
    finally:
        loop.call_soon(loop.stop)
