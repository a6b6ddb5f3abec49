"""Beam search on top of the engine: each search is one request whose sequences pause after each
token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nanoactor.admission.request import Request
from nanoactor.beams.search import BeamSearch, candidates_per_beam
from nanoactor.errors import InvalidRequest, only_ours
from nanoactor.model_files.files import ModelFiles
from nanoactor.options.config import EngineConfig
from nanoactor.requests.outputs import BeamSearchOutput, Logprobs
from nanoactor.requests.params import MAX_ANSWERS, BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Requests(Protocol):
    """The part of `AsyncLLM` that a beam search uses."""

    def submit_held(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Request:
        """Submit a prompt whose sequences pause after each token until they are resumed."""


class BeamSearcher:
    """Runs beam searches on one engine. Each search is one request with one sequence per beam. Each
    sequence pauses after every token until the search supplies its next token."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self._config = config
        self._files = files
        vision = files.config.vision
        self._placeholders = (vision.image_token_id, vision.video_token_id) if vision else ()
        """Token ids that no beam may contain. A beam becomes part of the next step's prompt, in
        which these ids would stand for images or videos."""
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
        """Run a beam search and return its result. Raises the same errors as
        `AsyncLLM.beam_search`. Canceling the call aborts the request."""
        request = engine.submit_held(
            prompt,
            self._check(prompt, params),
            priority=priority,
            chat_template_kwargs=chat_template_kwargs,
        )
        try:
            search = await self._search(request, params)
        finally:
            request.close()
        result = search.result()
        if self._files.tokenizer_directory is not None:
            await asyncio.to_thread(self._decode_texts, result, params.include_stop_str_in_output)
        return result

    async def _search(self, request: Request, params: BeamSearchParams) -> BeamSearch:
        """Run the search until no step can change its result, then end all sequences of the
        request."""
        logprobs = await request.held()
        search = BeamSearch(request.prompt_token_ids, params, self._files.eos_token_ids)
        # At the first step all sequences are equal, so they have the same candidates.
        search.advance([self._without_placeholders(logprobs[0])])
        assignment = BeamAssignment(params.beam_width)
        while not search.is_over:
            parents = assignment.assign(search.parents)
            tokens = [search.live[0].tokens[-1]] * params.beam_width
            for sequence, beam in zip(assignment.sequence_of, search.live, strict=True):
                tokens[sequence] = beam.tokens[-1]
            request.resume_held(parents, tokens)
            logprobs = await request.held()
            search.advance(
                [
                    self._without_placeholders(logprobs[sequence])
                    for sequence in assignment.sequence_of
                ]
            )
        request.resume_held([-1] * params.beam_width, tokens=[0] * params.beam_width)
        return search

    def _check(self, prompt: Any, params: Any) -> SamplingParams:
        """Return the sampling parameters of the request for this search. Raises `InvalidRequest` if
        the prompt or the parameters are not supported."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(
                f"params must be a BeamSearchParams object, got {type(params).__name__}"
            )
        if _has_media(prompt):
            raise InvalidRequest("beam search cannot be combined with images and videos")
        width, eos = params.beam_width, self._files.eos_token_ids
        count = candidates_per_beam(params, eos) + len(self._placeholders)
        count = min(count, self._files.config.vocab_size)
        if count > self._config.max_logprobs:
            raise InvalidRequest(
                f"beam_width {width} needs the {count} most likely tokens of each step, but "
                f"this engine returns at most {self._config.max_logprobs}; lower beam_width, "
                "or raise max_logprobs"
            )
        if width > MAX_ANSWERS:
            raise InvalidRequest(f"beam_width must be at most {MAX_ANSWERS}, got {width}")
        if width > self._config.max_waiting_requests:
            raise InvalidRequest(
                f"beam_width is {width}, but at most {self._config.max_waiting_requests} "
                "requests may wait; lower beam_width, or raise max_waiting_requests"
            )
        return SamplingParams(
            temperature=0.0,
            repetition_penalty=1.0,  # the model's default would only cost time
            seed=0,
            logprobs=count,
            max_tokens=params.max_tokens,
            n=width,
            ignore_eos=True,
            detokenize=False,
        )

    def _without_placeholders(self, logprobs: Logprobs) -> Logprobs:
        for token in self._placeholders:
            logprobs.pop(token, None)
        return logprobs

    def _decode_texts(self, result: BeamSearchOutput, include_stop: bool) -> None:
        tokenizer = self._load_tokenizer()
        for sequence in result.sequences:
            hides_stop = sequence.finish_reason == "stop" and not include_stop
            tokens = sequence.tokens[:-1] if hides_stop else sequence.tokens
            sequence.text = tokenizer.decode(tokens, skip_special_tokens=False)

    def _load_tokenizer(self) -> Tokenizer:
        # Imported here because most user processes do not need this library.
        from nanoactor.text.tokenizer import load_tokenizer

        directory = self._files.tokenizer_directory
        assert directory is not None
        with self._tokenizer_lock, only_ours():
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(directory)
            return self._tokenizer


class BeamAssignment:
    """Assignment of beams to the sequences of a request. The best child of a beam continues in its
    parent's sequence, so that only one new position is computed for it; the other children become
    copies."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self.sequence_of: list[int] = []
        """Index of the sequence of each live beam; empty before the first step."""

    def assign(self, parents: Sequence[int]) -> list[int]:
        """Assign sequences to the new beams. `parents` contains, for each new beam, the index of
        the current beam that it extends. Return, for each sequence, the index of the sequence that
        it becomes a copy of. Sequences that stay in place or are unused have their own index."""
        before, sources = self.sequence_of, list(range(self._answers))
        if not before:  # all sequences are identical
            self.sequence_of = sources[: len(parents)]
            return sources
        self.sequence_of = [-1] * len(parents)
        free = set(sources)
        for beam, parent in enumerate(parents):
            if before[parent] in free:
                self.sequence_of[beam] = before[parent]
                free.remove(before[parent])
        spare = iter(sorted(free))
        for beam, parent in enumerate(parents):
            if self.sequence_of[beam] < 0:
                self.sequence_of[beam] = next(spare)
                sources[self.sequence_of[beam]] = before[parent]
        return sources


def _has_media(prompt: Any) -> bool:
    """Return True if a prompt contains images, videos or other content that is not text."""
    if isinstance(prompt, Mapping):
        return prompt.get("multi_modal_data") is not None
    if not isinstance(prompt, list | tuple):
        return False
    contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)
