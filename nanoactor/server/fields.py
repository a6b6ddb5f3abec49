"""Table of all request fields: whether each is supported ("honoured"), rejected ("refused") or
ignored.

It lists all fields that the APIs of OpenAI, Anthropic and vLLM define for the routes that generate
text. `python -m tests.server.fields_table` generates the table in `docs/server.md` from it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from typing import Any, Literal

from nanoactor.requests.params import REJECTED, SamplingParams

log = logging.getLogger("nanoactor.server")

_INDEX = re.compile(r"\[\d+\]")
Status = Literal["honoured", "refused", "ignored"]
_CHAT_AND_TEXT, _CHAT, _TEXT = ("chat", "completions"), ("chat",), ("completions",)
_RESPONSES, _MESSAGES = ("responses",), ("messages",)
_AGENTS, _ALL = ("responses", "messages"), ("chat", "completions", "responses", "messages")
TEMPLATE_FIELDS = ("reasoning_effort", "verbosity", "enable_thinking", "thinking")
"""Request fields that a chat template may read as variables with the same names."""
_POOLING = "embeddings", "rerank", "score"
_NOT_STORED = "responses are not stored; send the whole conversation as input"
_FOR_TEMPLATES = "passed to the chat template if the template reads it, otherwise ignored"


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A top-level field of the request body, and how the server treats it."""

    name: str
    routes: tuple[str, ...]
    status: Status
    neutral: tuple[Any, ...] = ()
    """Values, besides null, that have no effect. They are accepted even if the field is rejected
    otherwise."""
    note: str = ""


_NOT_SENT = {"output_kind", "detokenize", "structured_outputs", *REJECTED}
SAMPLING = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in _NOT_SENT)
"""Sampling parameters of the engine that are also request fields. This excludes parameters that the
server sets itself or rejects, and output constraints, which have several fields of their own."""

_CHAT_ONLY_SAMPLING = {"n", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "max_tokens"}
EXTENSIONS = tuple(name for name in SAMPLING if name not in {*_CHAT_ONLY_SAMPLING, "stop"})
"""Sampling parameters that the Responses and Messages routes accept although their APIs do not
define them."""


def _fields(
    status: Status, routes: tuple[str, ...], *names: str, note: str = "", **neutral: Any
) -> list[Field]:
    """Create fields with the same status, routes and note. There is one field for each of `names`,
    and one for each keyword argument, which also sets the field's neutral value."""
    fields = [Field(name, routes, status, note=note) for name in names]
    return fields + [Field(name, routes, status, (v,), note) for name, v in neutral.items()]


_honoured = functools.partial(_fields, "honoured")
_refused = functools.partial(_fields, "refused")
_ignored = functools.partial(_fields, "ignored")

FIELDS: tuple[Field, ...] = (
    *_honoured(_CHAT_AND_TEXT, *SAMPLING),
    *_honoured(_AGENTS, *EXTENSIONS),
    *_honoured(_ALL, "model", "stream"),
    *_honoured(_ALL, "priority", note="lower values run first"),
    *_honoured((*_CHAT_AND_TEXT, "responses"), "user", note="written to the access log"),
    *_honoured(
        _CHAT_AND_TEXT, "stream_options", note="`include_usage` and `continuous_usage_stats`"
    ),
    *_honoured(_TEXT, "prompt", note="text, token ids, or a list of either"),
    *_honoured(_TEXT, "echo", note="with `max_tokens` 0, nothing is generated"),
    *_honoured(("chat", *_AGENTS), "tools", "chat_template_kwargs"),
    *_honoured(_CHAT, "messages", "max_completion_tokens"),
    *_honoured(_CHAT, "add_generation_prompt", "continue_final_message", "separate_reasoning"),
    *_honoured(
        ("chat", "responses"),
        "tool_choice",
        note="`auto`, `none`, `required`, a function, or `allowed_tools`",
    ),
    *_honoured(("chat", "responses"), "parallel_tool_calls", note="false allows at most one call"),
    *_honoured(_CHAT_AND_TEXT, "response_format", note="`text`, `json_object` or `json_schema`"),
    *_honoured(_CHAT_AND_TEXT, "structured_outputs", note="same as in vLLM"),
    *_honoured(_CHAT_AND_TEXT, "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *_honoured(_CHAT, *TEMPLATE_FIELDS, note=_FOR_TEMPLATES),
    *_honoured(_CHAT, "top_logprobs", note="requires `logprobs`"),
    *_honoured(_CHAT_AND_TEXT, "return_tokens_as_token_ids", note="applies to `logprobs`"),
    *_honoured(
        _CHAT_AND_TEXT,
        "return_token_ids",
        note="adds `token_ids` and `prompt_token_ids` to the response",
    ),
    *_refused(_CHAT_AND_TEXT, use_beam_search=False),
    *_refused(_CHAT_AND_TEXT, best_of=1, note=f"this field {REJECTED['best_of']}"),
    *_refused(
        _CHAT_AND_TEXT, logits_processors=[], note=f"this field {REJECTED['logits_processors']}"
    ),
    *_refused(_CHAT_AND_TEXT, detokenize=True, note="answers are always text"),
    *_refused(_CHAT_AND_TEXT, "structural_tag", logprob_token_ids=[]),
    *_refused(_CHAT_AND_TEXT, return_weight_versions=False),
    *_refused(_CHAT_AND_TEXT, thinking_token_budget=-1, repetition_detection={}),
    *_refused(_CHAT_AND_TEXT, truncation_side="left", note="the last tokens are always kept"),
    *_refused(
        _CHAT_AND_TEXT, kv_transfer_params={}, note="the parameters could replace the prompt"
    ),
    *_refused(
        _CHAT_AND_TEXT, mm_processor_kwargs={}, media_io_kwargs={}, routed_experts_prompt_start=0
    ),
    *_refused(_TEXT, suffix="", prompt_embeds=[], add_special_tokens=True),
    *_honoured(_CHAT_AND_TEXT, "json_schema", note="SGLang's name for `structured_outputs.json`"),
    *_honoured(_CHAT_AND_TEXT, "regex", note="SGLang's name for `structured_outputs.regex`"),
    *_honoured(_CHAT_AND_TEXT, "grammar", note="llama.cpp's name for `structured_outputs.grammar`"),
    *_honoured(_CHAT_AND_TEXT, "ebnf", note="SGLang's name for `structured_outputs.grammar`"),
    *_honoured(_CHAT_AND_TEXT, "max_new_tokens", note="SGLang's name for `max_tokens`"),
    *_honoured(_CHAT_AND_TEXT, "min_new_tokens", note="SGLang's name for `min_tokens`"),
    *_refused(
        _CHAT_AND_TEXT,
        repeat_penalty=1,
        note="this penalty applies only to the latest tokens; use `repetition_penalty` instead",
    ),
    *_refused(_CHAT_AND_TEXT, typical_p=1, top_a=0, top_n_sigma=-1, mirostat=0, dynatemp_range=0),
    *_refused(_CHAT_AND_TEXT, dry_multiplier=0, xtc_probability=0, adaptive_target=-1),
    *_refused(
        _CHAT_AND_TEXT,
        "samplers",
        "stop_regex",
        "custom_logit_processor",
        note="this sampling method is not supported",
    ),
    *_refused(_CHAT_AND_TEXT, n_predict=-1, note="use `max_tokens` instead"),
    *_refused(_CHAT_AND_TEXT, n_probs=0, note="use `logprobs` instead"),
    *_refused(_CHAT_AND_TEXT, no_stop_trim=False, note="use `include_stop_str_in_output` instead"),
    *_refused(_CHAT_AND_TEXT, lora=[], lora_path="", return_hidden_states=False),
    *_ignored(
        _CHAT_AND_TEXT, "cache_prompt", "id_slot", "min_keep", "repeat_last_n", "t_max_predict_ms"
    ),
    *_ignored(_CHAT_AND_TEXT, "session_params", "stream_reasoning"),
    *_refused(
        _CHAT_AND_TEXT,
        extra_body={},
        options={},
        note="put the field's members at the top level of the request",
    ),
    *_refused(_CHAT, add_special_tokens=False, echo=False),
    *_refused(_CHAT, include_reasoning=True, note="use `separate_reasoning` instead"),
    *_refused(_CHAT, return_prompt_text=False, documents=[], modalities=["text"]),
    *_refused(_CHAT, "chat_template", note="the model's own chat template is used"),
    *_refused(_CHAT, functions=[], note="use `tools` instead"),
    Field("function_call", _CHAT, "refused", ("none", "auto"), "use `tool_choice` instead"),
    *_refused(_CHAT, "audio", "moderation", "web_search_options"),
    *_ignored(
        _CHAT_AND_TEXT, "guided_decoding_backend", "guided_whitespace_pattern", "length_penalty"
    ),
    *_ignored(_CHAT_AND_TEXT, "early_stopping", "spaces_between_special_tokens"),
    *_ignored(_CHAT_AND_TEXT, "watermarking", "stream_interval"),
    *_ignored(_CHAT_AND_TEXT, "request_id", note="use the header `x-request-id` instead"),
    *_ignored(_CHAT_AND_TEXT, "session_id", "vllm_xargs", "ec_transfer_params"),
    *_ignored(_CHAT_AND_TEXT, "cache_salt", note="the prefix cache is shared by all callers"),
    *_ignored(_CHAT_AND_TEXT, "mm_payload", "return_mm_kwargs", "return_token_offsets"),
    *_ignored(_CHAT, "metadata", "store", "service_tier", "prediction", "safety_identifier"),
    *_ignored(_CHAT, "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *_honoured(_RESPONSES, "input", "instructions", "max_output_tokens", "stop"),
    *_honoured(_RESPONSES, "text", note="`format`, and `verbosity` for the chat template"),
    *_honoured(_RESPONSES, "reasoning", note="`effort` is passed to the chat template"),
    *_honoured(
        _RESPONSES,
        "include",
        note="`reasoning.encrypted_content` and `message.output_text.logprobs`",
    ),
    *_honoured(_RESPONSES, "top_logprobs", note="applies to the tokens of the text"),
    *_honoured(_RESPONSES, "store", note="nothing is stored, and the response says so"),
    *_honoured(_RESPONSES, "truncation", note="a long input is never truncated"),
    *_honoured(_RESPONSES, "metadata", note="returned in the response"),
    *_refused(_RESPONSES, "previous_response_id", "conversation", note=_NOT_STORED),
    *_refused(
        _RESPONSES,
        background=False,
        note="responses are not stored, so they could not be fetched later",
    ),
    *_refused(_RESPONSES, "prompt", note="prompt templates are not stored"),
    *_refused(_RESPONSES, image={}, note="only text is supported"),
    *_refused(_RESPONSES, "moderation", "max_tokens", "max_completion_tokens"),
    *_ignored(_RESPONSES, "background_options", "max_tool_calls", "stream_options"),
    *_ignored(_RESPONSES, "access_programs", "client_metadata", "context_management"),
    *_ignored(_RESPONSES, "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *_ignored(_RESPONSES, "safety_identifier"),
    *_honoured(_MESSAGES, "messages", "max_tokens", "system", "stop_sequences"),
    *_honoured(_MESSAGES, "tool_choice", note="`auto`, `any`, `none`, or a `tool`"),
    *_honoured(
        _MESSAGES,
        "thinking",
        note="with `display: omitted`, reasoning is returned as a sealed (opaque) string, not text",
    ),
    *_honoured(_MESSAGES, "output_config", note="`format`, and `effort` for the chat template"),
    *_honoured(_MESSAGES, "output_format", note="older location of `output_config.format`"),
    *_refused(_MESSAGES, mcp_servers=[], note="the server does not run tools"),
    *_refused(_MESSAGES, "container", note="the server does not run tools"),
    *_refused(_MESSAGES, "stop", note="use `stop_sequences` instead"),
    *_ignored(_MESSAGES, "metadata", "cache_control", "context_management", "compaction"),
    *_ignored(_MESSAGES, "inference_geo", "speed", "betas", "diagnostics", "thread"),
    *_ignored(_MESSAGES, "workspace_id", "user_profile_id", "billing_policy"),
    *_ignored(_MESSAGES, "fallbacks", "fallback_credit_token"),
    *_ignored(_AGENTS, "service_tier"),
    *_refused(_AGENTS, n=1, note="these APIs return a single answer"),
    *_refused(
        _AGENTS, logprobs=False, prompt_logprobs=0, note="use `/v1/chat/completions` instead"
    ),
    *_refused(_AGENTS, "truncate_prompt_tokens", "structured_outputs", "response_format"),
    *_honoured(_POOLING, "model", "priority", "user", "truncate_prompt_tokens"),
    *_honoured(("embeddings",), "input", "encoding_format", "dimensions", "normalize"),
    *_honoured(("embeddings",), "prompt_name", "prompt"),
    *_honoured(("rerank",), "query", "top_n", "return_documents"),
    *_honoured(("score",), "text_1", "text_2", "queries"),
    *_honoured(("rerank", "score"), "documents", "instruction"),
    *_refused(
        _POOLING,
        add_special_tokens=True,
        note="the special tokens that the model was trained with are always added",
    ),
    *_refused(_POOLING, truncation_side="left", note="the last tokens are always kept"),
    *_refused(_POOLING, mm_processor_kwargs={}, embed_dtype="float32", endianness="native"),
    *_refused(("embeddings",), messages=[], note="use `input` instead"),
    *_refused(
        ("embeddings",), instruction="", note="use `prompt` instead, which is put before each text"
    ),
    *_refused(("rerank", "score"), max_chunks_per_doc=0, max_tokens_per_doc=0),
    *_refused(_AGENTS, "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


TOKENIZE_FIELDS: dict[str, Field] = {
    field.name: field
    for field in _refused(
        ("tokenize",), "chat_template", mm_processor_kwargs={}, return_token_strs=False
    )
}
"""Fields of vLLM's `/tokenize`, by name, that are rejected because they would change the result."""


def route_fields(route: str) -> dict[str, Field]:
    """Return the fields of a route by name. `route` is a name as in `Field.routes`, such as
    "chat"."""
    return {field.name: field for field in FIELDS if route in field.routes}


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return True if the value is null or one of the neutral values, which have no effect."""
    return value is None or any(_is_same(value, other) for other in neutral)


def _is_same(value: Any, neutral: Any) -> bool:
    # In Python, True equals 1 and False equals 0, but to a client they are different values.
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


class WarnOnce:
    """Logs a warning once per unsupported field name, for at most `MAX_NAMES` different names."""

    MAX_NAMES = 200

    def __init__(self) -> None:
        self._names: set[str] = set()

    def warn(self, name: str, treatment: str) -> None:
        """Log how a field is treated, unless its name has been logged before."""
        if len(self._names) >= self.MAX_NAMES:
            return
        name = _INDEX.sub("[*]", name[:200])[:80]
        if name in self._names:
            return
        self._names.add(name)
        log.warning("requests have the field %r, which %s", name, treatment)
        if len(self._names) == self.MAX_NAMES:
            log.warning(
                "the names of %d ignored fields have been logged; no more will be logged",
                self.MAX_NAMES,
            )
