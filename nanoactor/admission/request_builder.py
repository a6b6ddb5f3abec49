"""Checks of users' requests, and their conversion to `Submit` messages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nanoactor.admission.admission import check_length
from nanoactor.errors import InvalidRequest
from nanoactor.grammar.check import check_spec
from nanoactor.messages.engine import Int32, RequestSpec, Stopping, Submit, TextOptions, TokenRules
from nanoactor.messages.resuming import ToldTokens
from nanoactor.model_files.files import ModelFiles, max_prompt_bytes
from nanoactor.models.sampling import columns
from nanoactor.options.config import EngineConfig
from nanoactor.pooling.requests import check_pooling, prepend_prompt, truncation_length
from nanoactor.requests.grammar_spec import MAX_GRAMMAR_BYTES
from nanoactor.requests.outputs import OutputSoFar
from nanoactor.requests.params import (
    DefaultTokens,
    SamplingParams,
    TokenCap,
    derived_seed,
    plain_number,
)
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from nanoactor.setup.actors import encoder_pages
from nanoactor.text.conversation import check_messages
from nanoactor.vision.media import Media
from nanoactor.vision.parts import MediaExtractor

log = logging.getLogger("nanoactor")

_NO_TOKENS = np.empty(0, np.int32)
_RESUMED_PRIORITY_OFFSET = 2**32
"""Amount subtracted from the priority of a request that resumes from another engine. It exceeds the
range of priorities, so that such requests run before all others."""


def check_request_id(request_id: object) -> None:
    """Raise `InvalidRequest` if a request id is not a string."""
    if not isinstance(request_id, str):
        raise InvalidRequest(f"request_id must be a string, got {request_id!r:.100}")


def check_uint63(**values: object) -> None:
    """Raise `InvalidRequest` unless all values are integers from 0 to 2^63 - 1, the range that
    messages between processes can contain. The argument names are used in the error message."""
    for name, value in values.items():
        if not isinstance(value, int) or not 0 <= value < 2**63:
            raise InvalidRequest(f"{name} must be an integer of at least 0, got {value!r:.100}")


def as_held(params: SamplingParams, submit: Submit, media: Sequence[Media]) -> Submit:
    """Return a copy of `submit` whose sequences pause after each token. Raises `InvalidRequest` if
    the request uses options or media that do not allow this."""
    if params.logprobs is None or params.max_tokens is None:
        raise InvalidRequest("submit_held requires logprobs and max_tokens to be set")
    spec = submit.spec
    if media or spec.grammar or spec.prompt_logprobs >= 0 or spec.text_options.stop:
        raise InvalidRequest(
            "requests submitted with submit_held cannot use images, videos, structured_outputs, "
            "prompt_logprobs or stop strings"
        )
    return dataclasses.replace(submit, spec=dataclasses.replace(spec, held=True))


class RequestBuilder:
    """Builds the `Submit` messages of one engine. All methods raise `InvalidRequest`, with the
    reason, if their input is invalid.

    Checks that need a tokenizer, such as the number of tokens in a text, are left to the tokenizer
    actor.
    """

    def __init__(self, config: EngineConfig, files: ModelFiles, seeds: random.Random) -> None:
        """`seeds` generates the seeds of requests that specify none."""
        self._max_logprobs = config.max_logprobs
        self._skip_tokenizer_init = config.skip_tokenizer_init
        self._files = files
        self._seeds = seeds
        self._media = MediaExtractor(config, files, encoder_pages(config, files))

    def fit_to_cache(self, tokens: int) -> ModelFiles:
        """If `max_model_len` is "auto", lower it to `tokens`, the capacity of the KV cache in
        tokens. Return the model files with the resulting `max_model_len`."""
        files = self._files.fit_to_cache(tokens)
        if files is not self._files:
            log.warning(
                "max_model_len has been lowered to %d, because the KV cache has no room for "
                "the %d tokens that the model allows",
                files.max_model_len,
                self._files.max_model_len,
            )
        self._files = files
        return files

    def build(
        self,
        prompt: Any,
        params: Any,
        priority: Any = 0,
        chat_template_kwargs: Any = None,
        media: tuple[Media, ...] | None = None,
        so_far: Any = None,
    ) -> tuple[Submit, tuple[Media, ...]]:
        """Return the `Submit` message of a request, whose uid is 0 until the frontend assigns one,
        and the request's media. `media` is what `extract_media` has returned together with
        `prompt`; if it is None, `build` calls `extract_media` itself. `so_far` is the output after
        which the request resumes."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be a SamplingParams object, got {params!r}")
        if not self._files.generates:
            raise InvalidRequest(
                "this model computes vectors or scores and does not generate text; load a "
                "text-generation model instead"
            )
        priority = _check_priority(priority)
        if media is None:
            prompt, media = self.extract_media(prompt)
        keep_last = self._keep_last(params, media)
        text, chat, token_ids = self._read_prompt(prompt, keep_last)
        options = self._encode_options(chat_template_kwargs)
        if chat_template_kwargs and chat is None:
            raise InvalidRequest(
                "chat_template_kwargs can be given only if the prompt is a list of messages"
            )
        self._check_params(params)
        spec = RequestSpec(
            priority=priority,
            sampling=self._sampling(params),
            stopping=self._stopping(params),
            text_options=_text_options(params),
            rules=_token_rules(params),
            logprobs=_logprob_count(params.logprobs),
            prompt_logprobs=_logprob_count(params.prompt_logprobs),
            grammar=self._grammar(params),
        )
        submit = Submit(
            uid=0,
            spec=spec,
            text=text,
            chat=chat,
            chat_options=options,
            token_ids=token_ids,
            item_times=tuple(one.times for one in media),
            bad_words=tuple(params.bad_words or ()),
            keep_last=keep_last,
        )
        if so_far is not None:
            submit = self._with_output(submit, params, so_far)
        return submit, media

    def build_pooled(
        self, prompt: Any, params: Any, priority: Any = 0, *, scores: bool = False
    ) -> Submit:
        """Return the `Submit` message of a pooling request, whose uid is 0 until the frontend
        assigns one. The request is for a score of a text pair if `scores` is True, otherwise for a
        vector."""
        files = self._files
        pooling = check_pooling(params, files.pooling, files.config.hidden_size)
        if pooling.returns_scores is not scores:
            makes = (
                "scores of pairs, not vectors; for vectors, load an embedding model"
                if pooling.returns_scores
                else "vectors, not scores"
            )
            raise InvalidRequest(f"this model computes {makes}")
        keep_last = truncation_length(params, files.max_model_len)
        text_with_prompt = prepend_prompt(prompt, params, pooling)
        text, _, token_ids = self._read_prompt(text_with_prompt, keep_last, pools=True)
        spec = RequestSpec(
            priority=_check_priority(priority),
            sampling=columns.pack({}),
            stopping=Stopping(max_tokens=0, min_tokens=0, eos_ids=(), stop_ids=()),
            text_options=_NO_TEXT,
            pools=True,
        )
        return Submit(0, spec, text, None, "{}", token_ids, keep_last=keep_last)

    def _with_output(self, submit: Submit, params: SamplingParams, so_far: Any) -> Submit:
        """Return the request, changed to resume after `so_far` and to run before all new
        requests."""
        if not isinstance(so_far, OutputSoFar):
            raise InvalidRequest(
                f"so_far must be an OutputSoFar object or None, got {so_far!r:.100}"
            )
        if params.n != 1:
            raise InvalidRequest(
                f"so_far continues a single answer, so n must be 1, got {params.n}; continue "
                "each answer with a separate request"
            )
        ids = _flat_ids("so_far.token_ids", so_far.token_ids)
        if len(ids) and ids.max() >= (vocabulary := self._files.config.vocab_size):
            raise InvalidRequest(
                f"so_far.token_ids contains {ids.max()}, which is outside the vocabulary of "
                f"{vocabulary} ids"
            )
        characters = plain_number(so_far.characters)
        if type(characters) is not int or not 0 <= characters < 2**31:
            raise InvalidRequest(
                f"so_far.characters must be an integer of at least 0, got {characters!r:.100}"
            )
        spec = dataclasses.replace(
            submit.spec,
            text_options=dataclasses.replace(submit.spec.text_options, delivered=characters),
            priority=submit.spec.priority - _RESUMED_PRIORITY_OFFSET,
        )
        output = ToldTokens(ids) if len(ids) else None
        return dataclasses.replace(submit, spec=spec, output=output)

    def params_or_default(self, params: SamplingParams | None) -> SamplingParams:
        """Return `params`, or the model's recommended sampling parameters if it is None."""
        return SamplingParams.for_model() if params is None else params

    def with_seed(self, params: Any) -> Any:
        """Return sampling parameters with a seed, which is generated if `params` has none. If a
        request is built some time after its arrival, call this on arrival, so that requests get the
        same seeds in each run."""
        if not isinstance(params, SamplingParams) or params.seed is not None:
            return params
        return dataclasses.replace(params, seed=self._seeds.getrandbits(64))

    def extract_media(self, prompt: Any) -> tuple[Any, tuple[Media, ...]]:
        """Return the prompt without its images and videos, and a tuple of these. This may read
        files and decode images; if `vision.parts.needs_opening(prompt)` is True, call it in a
        thread rather than on an event loop."""
        if isinstance(prompt, Mapping):
            prompt = dict(prompt)
            given = prompt.pop("multi_modal_data", None)
            kwargs = prompt.pop("mm_processor_kwargs", None)
            return prompt, self._media.of_data(given, kwargs)
        if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
            return self._media.of_messages(list(prompt))
        return prompt, ()

    def _keep_last(self, params: SamplingParams, media: tuple[Media, ...]) -> int:
        """Return the number of prompt tokens to keep, counted from the end; 0 keeps all of them."""
        requested, limit = params.truncate_prompt_tokens, self._files.max_model_len
        if requested is None:
            return 0
        if media:
            raise InvalidRequest(
                "truncate_prompt_tokens cannot be combined with images and videos, because "
                "the prompt could be cut in the middle of one"
            )
        if requested >= limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {requested}, but may be at most {limit - 1}, "
                f"because max_model_len is {limit} and must leave room for one output token"
            )
        room = max(1, params.max_tokens or params.min_tokens)
        return requested if requested > 0 else max(1, limit - room)

    def _read_prompt(
        self, prompt: Any, keep_last: int, *, pools: bool = False
    ) -> tuple[str | None, str | None, Int32]:
        """Return (text, messages as JSON, token ids) of a prompt. Only one of them is set: the
        others are None or an empty array."""
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys == {"prompt_token_ids"}:
                ids = _token_ids(prompt["prompt_token_ids"])
                return None, None, self._check_ids(ids[-keep_last:], pools)
            if keys != {"prompt"}:
                raise InvalidRequest(
                    "a prompt that is a dict must have either the key 'prompt' or the key "
                    "'prompt_token_ids', and may also have 'multi_modal_data' and "
                    f"'mm_processor_kwargs', but this one has the keys {sorted(map(str, keys))}"
                )
            prompt = prompt["prompt"]
        if self._skip_tokenizer_init:
            raise InvalidRequest(
                "the engine has no tokenizer (skip_tokenizer_init); give prompt_token_ids "
                "instead of text"
            )
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("the prompt is empty; it must have at least one token")
            return self._check_text(prompt), None, _NO_TOKENS
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return None, self._encode_chat(list(prompt)), _NO_TOKENS
        raise InvalidRequest(
            "a prompt must be a string, {'prompt_token_ids': [...]} or a list of messages, got "
            f"{type(prompt).__name__}"
        )

    def _check_ids(self, ids: Int32, pools: bool) -> Int32:
        check_length(len(ids), self._files.max_model_len, pools=pools)
        return ids

    def _check_text(self, text: str) -> str:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the prompt is not valid Unicode: {error}") from None
        limit = max_prompt_bytes(self._files)
        if size > limit:
            raise InvalidRequest(
                f"the prompt has {size} bytes, but with max_model_len {self._files.max_model_len} "
                f"at most {limit} bytes are accepted"
            )
        return text

    def _encode_chat(self, messages: list[Any]) -> str:
        check_messages(messages)
        return self._encode_json("messages", [dict(message) for message in messages])

    def _encode_options(self, options: Any) -> str:
        if options is not None and not isinstance(options, Mapping):
            raise InvalidRequest(f"chat_template_kwargs must be a dict, got {options!r}")
        return self._encode_json("chat_template_kwargs", dict(options or {}))

    def _encode_json(self, name: str, value: Any) -> str:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name} must contain only JSON values: {error}") from None
        return self._check_text(text)

    def _check_params(self, params: SamplingParams) -> None:
        vocabulary = self._files.config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= vocabulary:
                    raise InvalidRequest(
                        f"{name} contains {token}, which is outside the vocabulary of {vocabulary} "
                        "ids"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self._max_logprobs:
                raise InvalidRequest(
                    f"{name} is {getattr(params, name)}, but this engine returns at most "
                    f"{self._max_logprobs} (max_logprobs)"
                )
        for name, given in (("stop strings", params.stop), ("bad words", params.bad_words)):
            if given and self._skip_tokenizer_init:
                raise InvalidRequest(
                    f"{name} require a tokenizer, but the engine has none (skip_tokenizer_init)"
                )

    def _grammar(self, params: SamplingParams) -> str:
        """Return the requested grammar as `GrammarSpec` text; empty if the output is
        unconstrained."""
        constraint = params.structured_outputs
        if constraint is None:
            return ""
        assert isinstance(constraint, StructuredOutputsParams)
        if self._skip_tokenizer_init:
            raise InvalidRequest(
                "structured_outputs requires a tokenizer, but the engine has none "
                "(skip_tokenizer_init)"
            )
        return _grammar_text(constraint)

    def _sampling(self, params: SamplingParams) -> bytes:
        given = {name: getattr(params, name) for name in columns.NAMES}
        values = {**self._files.generation.sampling}
        values |= {name: value for name, value in given.items() if value is not None}
        values["top_k"] = max(0, values["top_k"])  # -1, like 0, means no limit
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        answers = ({**values, "seed": derived_seed(seed, index)} for index in range(params.n))
        return b"".join(map(columns.pack, answers))

    def _stopping(self, params: SamplingParams) -> Stopping:
        recommended = self._files.generation.max_new_tokens
        is_explicit = params.max_tokens is not None and not isinstance(
            params.max_tokens, DefaultTokens
        )
        return Stopping(
            # 0 means as many tokens as fit; it is replaced once the length of the prompt is known.
            max_tokens=params.max_tokens
            or (max(recommended, params.min_tokens) if recommended else 0),
            min_tokens=params.min_tokens,
            clamp_max_tokens=isinstance(params.max_tokens, TokenCap)
            or (not is_explicit and bool(params.max_tokens or recommended)),
            eos_ids=() if params.ignore_eos else self._files.eos_token_ids,
            stop_ids=tuple(params.stop_token_ids or ()),
        )


_NO_TEXT = TextOptions((), include_stop=False, skip_special=False, min_tokens=0, detokenize=False)


@functools.lru_cache(maxsize=8)  # all prompts of a batch have the same specification
def _grammar_text(constraint: StructuredOutputsParams) -> str:
    spec = constraint.spec()
    try:
        check_spec(spec)
    except InvalidRequest as error:
        raise InvalidRequest(f"structured_outputs: {error}") from None
    text = spec.to_text()
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"structured_outputs: the grammar has {size} bytes as text, but at most "
            f"{MAX_GRAMMAR_BYTES} are accepted"
        )
    return text


def _logprob_count(logprobs: int | None) -> int:
    return -1 if logprobs is None else logprobs


def _check_priority(priority: Any) -> int:
    number = plain_number(priority)
    is_integer = isinstance(number, int) and not isinstance(number, bool)
    if not is_integer or not -(2**31) <= number < 2**31:
        raise InvalidRequest(f"priority must be a 32-bit integer, got {number!r}")
    return int(number)


def _token_rules(params: SamplingParams) -> TokenRules | None:
    """Return the rules on token ids; None if there are none. They lack the token ids of bad words,
    which the tokenizer adds."""
    biases = params.logit_bias or {}
    if not (biases or params.allowed_token_ids or params.bad_words):
        return None
    return TokenRules(
        allowed_ids=np.array(params.allowed_token_ids or (), np.int32),
        bias_ids=np.array(list(biases), np.int32),
        biases=np.array(list(biases.values()), np.float32),
        word_ids=_NO_TOKENS,
        word_lengths=_NO_TOKENS,
    )


def _text_options(params: SamplingParams) -> TextOptions:
    return TextOptions(
        stop=tuple(params.stop or ()),
        include_stop=params.include_stop_str_in_output,
        skip_special=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        detokenize=params.detokenize,
    )


def _token_ids(values: Any) -> Int32:
    ids = _flat_ids("prompt_token_ids", values)
    if not ids.size:
        raise InvalidRequest("the prompt is empty; it must have at least one token")
    return ids


def _flat_ids(name: str, values: Any) -> Int32:
    try:
        ids = np.asarray(values)
    except ValueError:
        ids = np.asarray(["ragged"])
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidRequest(f"{name} must be a flat list of integers")
    if not ids.size:
        return _NO_TOKENS
    with contextlib.suppress(OverflowError):
        if ids.min() >= 0 and ids.max() < 2**31:
            return ids.astype(np.int32)
    raise InvalidRequest(f"token ids must be from 0 to 2147483647, got {ids.min()} to {ids.max()}")
