"""Beam search by requests of one token each, above the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nanoactor.beam_search import BeamSearch, candidates_per_beam
from nanoactor.config import EngineConfig
from nanoactor.errors import EngineOverloaded, InvalidRequest, only_ours
from nanoactor.model_files import ModelFiles
from nanoactor.outputs import BeamSearchOutput, Logprobs, RequestOutput, RequestOutputKind
from nanoactor.params import BeamSearchParams, SamplingParams
from nanoactor.request import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Requests(Protocol):
    """The part of `AsyncLLM` that a search needs."""

    def submit(
        self,
        prompts: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Request]:
        """Queue several prompts, all or none of them."""

    async def wait_for_capacity(self) -> None:
        """Wait until the queue may take another request."""


class BeamSearcher:
    """Searches of one engine. Each step submits every live beam as a prompt of its own, and relies
    on the prefix cache for all but its last tokens."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self._config = config
        self._files = files
        vision = files.config.vision
        self._placeholders = (vision.image_token_id, vision.video_token_id) if vision else ()
        """No beam goes on with these: in a prompt, which it is for the next step, they stand for
        pictures."""
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_lock = threading.Lock()

    async def search(
        self,
        engine: Requests,
        prompt: Any,
        params: BeamSearchParams,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> BeamSearchOutput:
        """Search to the end; what `AsyncLLM.beam_search` raises is raised here. Cancelling it
        aborts the requests of the step."""
        one_token = self._check(prompt, params)
        requests = engine.submit(
            [prompt], one_token, priority=priority, chat_template_kwargs=chat_template_kwargs
        )
        (first,) = await _finish(requests)
        self._check_room(len(first.prompt_token_ids), params)
        search = BeamSearch(first.prompt_token_ids, params, self._files.eos_token_ids)
        search.advance([self._likeliest(first)])
        while not search.is_over:
            prompts = [{"prompt_token_ids": beam.tokens} for beam in search.live]
            requests = await _submit(engine, prompts, one_token, priority)
            search.advance([self._likeliest(output) for output in await _finish(requests)])
        found = search.result()
        if self._files.tokenizer_directory is not None:
            await asyncio.to_thread(self._write_texts, found, params.include_stop_str_in_output)
        return found

    def _check(self, prompt: Any, params: Any) -> SamplingParams:
        """Raise `InvalidRequest` for what no search can do; return the parameters of a step."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params must be BeamSearchParams, got {type(params).__name__}")
        if _has_media(prompt):
            raise InvalidRequest("beam search does not go with pictures and videos")
        width, eos = params.beam_width, self._files.eos_token_ids
        count = candidates_per_beam(params, eos) + len(self._placeholders)
        count = min(count, self._files.config.vocab_size)
        if count > self._config.max_logprobs:
            raise InvalidRequest(
                f"a beam_width of {width} needs the {count} likeliest tokens of each step, but "
                f"this engine tells {self._config.max_logprobs} at most: raise max_logprobs"
            )
        if width > self._config.max_waiting_requests:
            raise InvalidRequest(
                f"beam_width is {width}, but at most {self._config.max_waiting_requests} requests "
                "may wait: raise max_waiting_requests"
            )
        return SamplingParams(
            temperature=0.0,
            repetition_penalty=1.0,  # the model's default would cost, and change nothing
            seed=0,
            logprobs=count,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _check_room(self, prompt: int, params: BeamSearchParams) -> None:
        limit = self._files.max_model_len
        if params.max_tokens > limit - prompt:
            raise InvalidRequest(
                f"max_tokens is {params.max_tokens}, but after a prompt of {prompt} tokens "
                f"max_model_len ({limit}) leaves {limit - prompt}"
            )

    def _likeliest(self, output: RequestOutput) -> Logprobs:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        (told,) = logprobs
        for token in self._placeholders:
            told.pop(token, None)
        return told

    def _write_texts(self, found: BeamSearchOutput, include_stop: bool) -> None:
        tokenizer = self._load_tokenizer()
        for sequence in found.sequences:
            hides = sequence.finish_reason == "stop" and not include_stop
            tokens = sequence.tokens[:-1] if hides else sequence.tokens
            sequence.text = tokenizer.decode(tokens, skip_special_tokens=False)

    def _load_tokenizer(self) -> Tokenizer:
        # Here alone: most users' processes have no use for the library.
        from nanoactor.text.tokenizer import load_tokenizer

        directory = self._files.tokenizer_directory
        assert directory is not None
        with self._tokenizer_lock, only_ours():
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(directory)
            return self._tokenizer


async def _submit(
    engine: Requests, prompts: list[Any], params: SamplingParams, priority: int
) -> list[Request]:
    """Submit a later step, however long the queue is full: what came before is not thrown away."""
    while True:
        try:
            return engine.submit(prompts, params, priority=priority)
        except EngineOverloaded:
            await engine.wait_for_capacity()


async def _finish(requests: list[Request]) -> list[RequestOutput]:
    """The last output of each; where one raises, or the reader is cancelled, all are aborted."""
    try:
        return [await anext(request) for request in requests]
    finally:
        for request in requests:
            request.close()


def _has_media(prompt: Any) -> bool:
    """Tell whether a prompt brings anything but text."""
    if isinstance(prompt, Mapping):
        return prompt.get("multi_modal_data") is not None
    if not isinstance(prompt, list | tuple):
        return False
    contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)
