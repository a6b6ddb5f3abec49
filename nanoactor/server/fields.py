"""The treatment of each field of a request: honoured, refused, or ignored.

Every field of the two completion routes in OpenAI's API and in vLLM's stands here. `docs/server.md`
shows this table (`python -m tests.server.fields_table` writes it).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from typing import Any, Literal

from nanoactor.params import REFUSED, SamplingParams

log = logging.getLogger("nanoactor.server")

_INDEX = re.compile(r"\[\d+\]")
Status = Literal["honoured", "refused", "ignored"]
_BOTH, _CHAT, _TEXT = ("chat", "completions"), ("chat",), ("completions",)
TEMPLATE_FIELDS = ("reasoning_effort", "verbosity", "enable_thinking", "thinking")
"""Fields that a chat template may read as variables of these names."""
_NEIGHBOURS = "llama.cpp's and SGLang's; give `structured_outputs`"
_FOR_TEMPLATES = "given to the chat template, if that reads it; else ignored"


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A field at the top of a request."""

    name: str
    routes: tuple[str, ...]
    status: Status
    neutral: tuple[Any, ...] = ()
    """The values, besides null, that ask for nothing; of a refused field they are accepted."""
    note: str = ""


_NOT_SENT = {"output_kind", "detokenize", "structured_outputs", *REFUSED}
SAMPLING = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in _NOT_SENT)
"""The engine's sampling parameters, which requests have under the same names. `output_kind` and
`detokenize` are the server's affair, and constraints have several fields."""


def _fields(
    status: Status, routes: tuple[str, ...], *names: str, note: str = "", **neutral: Any
) -> list[Field]:
    """Fields with the same fate; those by keyword have a value that asks for nothing."""
    found = [Field(name, routes, status, note=note) for name in names]
    return found + [Field(name, routes, status, (v,), note) for name, v in neutral.items()]


_honoured = functools.partial(_fields, "honoured")
_refused = functools.partial(_fields, "refused")
_ignored = functools.partial(_fields, "ignored")

FIELDS: tuple[Field, ...] = (
    *_honoured(_BOTH, *SAMPLING, "model", "stream"),
    *_honoured(_BOTH, "priority", note="a lower one goes first"),
    *_honoured(_BOTH, "user", note="stands in the access log"),
    *_honoured(_BOTH, "stream_options", note="`include_usage`, `continuous_usage_stats`"),
    *_honoured(_TEXT, "prompt", note="text, token ids, or a list of either"),
    *_honoured(_TEXT, "echo", note="with `max_tokens` 0 nothing is generated"),
    *_honoured(_CHAT, "messages", "max_completion_tokens", "tools", "chat_template_kwargs"),
    *_honoured(_CHAT, "add_generation_prompt", "continue_final_message", "separate_reasoning"),
    *_honoured(_CHAT, "tool_choice", note="`auto`, `none`, `required`, or a function"),
    *_honoured(_CHAT, "parallel_tool_calls", note="false: one call at most"),
    *_honoured(_BOTH, "response_format", note="`text`, `json_object`, `json_schema`"),
    *_honoured(_BOTH, "structured_outputs", note="as vLLM's"),
    *_honoured(_BOTH, "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *_honoured(_CHAT, *TEMPLATE_FIELDS, note=_FOR_TEMPLATES),
    *_honoured(_CHAT, "top_logprobs", note="with `logprobs`"),
    *_honoured(_BOTH, "return_tokens_as_token_ids", note="in `logprobs`"),
    *_refused(_BOTH, use_beam_search=False),
    *_refused(_BOTH, best_of=1, note=REFUSED["best_of"]),
    *_refused(_BOTH, logits_processors=[], note=REFUSED["logits_processors"]),
    *_refused(_BOTH, detokenize=True, note="answers are text"),
    *_refused(_BOTH, "structural_tag", logprob_token_ids=[]),
    *_refused(_BOTH, return_token_ids=False, return_weight_versions=False),
    *_refused(_BOTH, thinking_token_budget=-1, repetition_detection={}),
    *_refused(_BOTH, truncation_side="left", note="the last tokens are kept"),
    *_refused(_BOTH, kv_transfer_params={}, note="may replace the prompt"),
    *_refused(_BOTH, mm_processor_kwargs={}, media_io_kwargs={}, routed_experts_prompt_start=0),
    *_refused(_TEXT, suffix="", prompt_embeds=[], add_special_tokens=True),
    *_refused(_BOTH, "json_schema", "grammar", "ebnf", "regex", note=_NEIGHBOURS),
    *_refused(_BOTH, extra_body={}, note="its members stand at the top"),
    *_refused(_BOTH, options={}, note="its members have names of their own at the top"),
    *_refused(_CHAT, add_special_tokens=False, echo=False),
    *_refused(_CHAT, include_reasoning=True, note="see `separate_reasoning`"),
    *_refused(_CHAT, return_prompt_text=False, documents=[], modalities=["text"]),
    *_refused(_CHAT, "chat_template", note="the model's own is used"),
    *_refused(_CHAT, functions=[], note="give `tools`"),
    Field("function_call", _CHAT, "refused", ("none", "auto"), "give `tool_choice`"),
    *_refused(_CHAT, "audio", "moderation", "web_search_options"),
    *_ignored(_BOTH, "guided_decoding_backend", "guided_whitespace_pattern", "length_penalty"),
    *_ignored(_BOTH, "early_stopping", "spaces_between_special_tokens"),
    *_ignored(_BOTH, "watermarking", "stream_interval"),
    *_ignored(_BOTH, "request_id", note="give the header `x-request-id`"),
    *_ignored(_BOTH, "session_id", "vllm_xargs", "ec_transfer_params"),
    *_ignored(_BOTH, "cache_salt", note="the prefix cache is shared by all who may call"),
    *_ignored(_BOTH, "mm_payload", "return_mm_kwargs", "return_token_offsets"),
    *_ignored(_CHAT, "metadata", "store", "service_tier", "prediction", "safety_identifier"),
    *_ignored(_CHAT, "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)


OF_TOKENIZE: dict[str, Field] = {
    field.name: field
    for field in _refused(
        ("tokenize",), "chat_template", mm_processor_kwargs={}, return_token_strs=False
    )
}
"""Fields of vLLM's `/tokenize` that would change its answer."""


def of_route(route: str) -> dict[str, Field]:
    """The fields of a route, by name."""
    return {field.name: field for field in FIELDS if route in field.routes}


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Tell whether a value asks for nothing."""
    return value is None or any(_same(value, other) for other in neutral)


def _same(value: Any, neutral: Any) -> bool:
    # To Python, true is 1 and false is 0; to a client they are not.
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


class Warned:
    """Names that were warned of: once each, and not more of them than anybody would read."""

    MOST = 200

    def __init__(self) -> None:
        self._names: set[str] = set()

    def warn(self, name: str, what: str = "is ignored (--strict refuses it)") -> None:
        """Log what becomes of a field, the first time."""
        if len(self._names) >= self.MOST:
            return
        name = _INDEX.sub("[*]", name[:200])[:80]
        if name in self._names:
            return
        self._names.add(name)
        log.warning("requests have the field %r, which %s", name, what)
        if len(self._names) == self.MOST:
            log.warning("%d names of ignored fields were logged; no more are", self.MOST)
