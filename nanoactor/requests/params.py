"""Sampling parameters, with the names and meanings of vLLM and the OpenAI API."""

from __future__ import annotations

import dataclasses
import hashlib
import numbers
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nanoactor.errors import InvalidRequest
from nanoactor.requests.known_names import SAMPLING
from nanoactor.requests.named_parameters import rejects_unknown_parameters
from nanoactor.requests.outputs import RequestOutputKind
from nanoactor.requests.structured_outputs import StructuredOutputsParams

MAX_STOP_STRINGS, MAX_STOP_LENGTH, MAX_STOP_IDS = 64, 1024, 256
MAX_RULED_IDS = 1024
"""Maximum length of `allowed_token_ids` and of `logit_bias`."""
MAX_ANSWERS = 128
"""Maximum value of `SamplingParams.n`."""
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH, MAX_BAD_WORD_TOKENS = 128, 256, 32
REJECTED: Mapping[str, str] = {
    name.theirs: name.note for name in SAMPLING if name.note and not name.ours
}
"""Parameters of vLLM that are always rejected, and the reason for each."""
IGNORED: Mapping[str, tuple[Any, ...]] = {
    name.theirs: name.accepts for name in SAMPLING if not name.note and not name.ours
}
"""Parameters of vLLM that nanoactor lacks. The values listed here are accepted, because they have
no effect."""
MODEL_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_tokens",
)
"""Parameters for which None selects the value that the model recommends."""


class DefaultTokens(int):
    """The default value of `max_tokens`. This type marks that the caller did not set the
    parameter."""


class TokenCap(int):
    """An upper bound for `max_tokens`, which is lowered if less room is left in the context. A
    plain integer that is too large is rejected instead."""


_DEFAULT_MAX_TOKENS = DefaultTokens(16)


@rejects_unknown_parameters(IGNORED)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of a request: how tokens are chosen, and when the output ends.

    Omitted parameters have vLLM's defaults. An explicit None selects the value that the model's
    `generation_config.json` recommends. If there is no recommendation, the parameter has no effect;
    `max_tokens=None` allows as many tokens as fit. A request without `SamplingParams` uses all
    recommended values, as do parameters that are omitted on the server or the command line
    (`for_model`).

    Filters are applied in the same order as in transformers: temperature, top-k, top-p, min-p. Each
    uses the result of the previous one. The constructor raises `InvalidRequest`, naming the invalid
    parameter.
    """

    n: int = 1
    """Number of outputs for each prompt. The first uses the given seed, and the others use seeds
    that are derived from it."""
    temperature: float | None = 1.0
    """Higher values make the output more random; 0 always selects the most likely token. Default on
    the server and the command line: the value that the model recommends."""
    top_p: float | None = 1.0
    """Keep only the most likely tokens whose probabilities add up to this value. Default on the
    server and the command line: the value that the model recommends."""
    top_k: int | None = 0
    """Keep only this many of the most likely tokens; 0 or -1 keeps all. Default on the server
    and the command line: the value that the model recommends."""
    min_p: float | None = 0.0
    """Drop tokens whose probability is less than this fraction of that of the most likely token.
    Default on the server and the command line: the value that the model recommends."""
    presence_penalty: float | None = 0.0
    """Subtract this value from the logit of each token that is already in the output. From -2 to 2.
    Default on the server and the command line: the value that the model recommends."""
    frequency_penalty: float | None = 0.0
    """Subtract this value from the logit of a token for each of its occurrences in the output. From
    -2 to 2. Default on the server and the command line: the value that the model recommends."""
    repetition_penalty: float | None = 1.0
    """For tokens in the prompt or the output, divide positive logits by this value, and multiply
    negative ones by it. 1 has no effect. Default on the server and the command line: the value that
    the model recommends."""
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    """Biases, from -100 to 100, that are added to the logits of the given token ids."""
    allowed_token_ids: Sequence[int] | None = None
    """Sample only from these token ids."""
    bad_words: Sequence[str] | None = None
    """Strings that must not appear in the output, whether at the start of a word or inside one."""
    seed: int | None = None
    """Seed for sampling; -1 means no seed. Default: a random seed, chosen when the request is
    submitted."""
    logprobs: int | None = None
    """Return the log-probability of each output token and of this many of the most likely tokens at
    its position, before temperature and all other rules are applied."""
    prompt_logprobs: int | None = None
    """Return the log-probability of each prompt token and of this many of the most likely tokens at
    its position. The whole prompt is then computed, without use of the prefix cache."""
    max_tokens: int | None = _DEFAULT_MAX_TOKENS
    """Maximum number of output tokens. Default on the command line: the value that the model
    recommends, or as many as fit in `max_model_len`."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the prompt; -1 keeps as many as leave room for the
    output."""
    min_tokens: int = 0
    """Minimum number of output tokens. Until it is reached, no end-of-sequence token, stop token or
    stop string ends the output."""
    stop: str | Sequence[str] | None = None
    """End the output where one of these strings appears in its text."""
    stop_token_ids: Sequence[int] | None = None
    """End the output at any of these token ids, in addition to the end-of-sequence tokens."""
    ignore_eos: bool = False
    """Continue the output after end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the output at the end of its text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Decode the output to text. If False, only token ids are returned."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """Required form of the output: {"json": SCHEMA}, {"regex": TEXT}, {"choice": [TEXT, ...]},
    {"grammar": TEXT} or {"json_object": true}. The output ends when the grammar is complete."""
    logits_processors: None = None
    """Not supported. Must be None."""
    best_of: int | None = None
    """Not supported: omit it or set it to 1."""

    def __post_init__(self) -> None:
        """Check all values, and normalize numbers, `stop` and `stop_token_ids`."""
        make_numbers_plain(self)
        if self.seed == -1 and self.seed is not True:
            object.__setattr__(self, "seed", None)
        _check_number("temperature", self.temperature, 0.0, 1e4)
        _check_number("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_integer("n", self.n, 1, MAX_ANSWERS, optional=False)
        _check_integer("top_k", self.top_k, -1)
        _check_integer("logprobs", self.logprobs, 0)
        _check_integer("prompt_logprobs", self.prompt_logprobs, 0)
        _check_integer("seed", self.seed, 0, 2**64 - 1)
        _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("min_tokens", self.min_tokens, 0, optional=False)
        _check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1, got 0")
        _check_integer("best_of", self.best_of, 1)
        for name in _FLAGS:
            _check_bool(name, getattr(self, name))
        for name, is_set in (
            ("logits_processors", self.logits_processors is not None),
            ("best_of", self.best_of not in (None, 1)),
        ):
            if is_set:
                raise InvalidRequest(f"{name} {REJECTED[name]}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequest(
                f"output_kind must be a RequestOutputKind, got {self.output_kind!r}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}"
                + (", the default)" if isinstance(self.max_tokens, DefaultTokens) else ")")
            )
        object.__setattr__(self, "stop", _check_stop_strings(self.stop))
        if self.stop and not self.detokenize:
            raise InvalidRequest(
                "stop strings require detokenize=True, because they are matched against the text"
            )
        object.__setattr__(self, "stop_token_ids", _check_stop_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _check_biases(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _check_allowed_ids(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _check_bad_words(self.bad_words))
        structured_outputs = _check_structured_outputs(self.structured_outputs, self.ignore_eos)
        object.__setattr__(self, "structured_outputs", structured_outputs)

    @classmethod
    def for_model(cls, **given: Any) -> SamplingParams:
        """Create parameters in which every omitted one has the value that the model recommends.
        Raises the errors of the constructor."""
        return cls(**{**dict.fromkeys(MODEL_DEFAULTS), **given})


@rejects_unknown_parameters({})
@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search. The constructor raises `InvalidRequest`, naming the invalid
    parameter."""

    beam_width: int
    """Number of sequences that are kept after each step and returned at the end."""
    max_tokens: int
    """Maximum number of output tokens per sequence."""
    ignore_eos: bool = False
    temperature: float = 0.0
    """Must be 0, because a beam search samples nothing."""
    length_penalty: float = 1.0
    """Sequences are ranked by the sum of their log-probabilities, divided by their length to this
    power. From -10 to 10. 0 ranks by the sum alone; higher values favor long sequences."""
    include_stop_str_in_output: bool = False
    """True to include the end-of-sequence token in `text`. `tokens` always includes it."""
    structured_outputs: None = None
    """Not supported. Must be None."""

    def __post_init__(self) -> None:
        """Check all values and normalize numbers."""
        make_numbers_plain(self)
        _check_integer("beam_width", self.beam_width, 1, optional=False)
        _check_integer("max_tokens", self.max_tokens, 1, optional=False)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            _check_bool(name, getattr(self, name))
        if self.length_penalty is None:
            raise InvalidRequest("length_penalty must be a number in [-10, 10], got None")
        _check_number("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.temperature != 0:
            raise InvalidRequest(
                "temperature must be 0 for beam search, which ranks sequences by "
                f"log-probability instead of sampling tokens, got {self.temperature!r:.100}"
            )
        if self.structured_outputs is not None:
            raise InvalidRequest(
                "structured_outputs must be None, because beam search does not support it"
            )


_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of the sequence at `index` among the sequences of a request. Index 0 uses the
    request's own seed. Other indices use a 64-bit BLAKE2b hash (RFC 7693) of that seed and the
    index."""
    if not index:
        return seed
    text = f"{seed} {index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


# Counts and ids are sent between processes as int32.
_MAX_INT32 = 2**31 - 1


_PLAIN_TYPES = (bool, int, float, str, tuple, type(None), DefaultTokens, TokenCap)


def plain_number(value: Any) -> Any:
    """Convert a number of another library, such as NumPy, to a Python number. Return anything else
    unchanged."""
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    # Importing numpy here would slow down every program that does not use it.
    if isinstance(value, getattr(sys.modules.get("numpy"), "bool_", ())):
        return bool(value)
    return float(value) if isinstance(value, numbers.Real) else value


def make_numbers_plain(options: Any) -> None:
    """Convert every field of a frozen dataclass with `plain_number`, in place."""
    for name, value in list(vars(options).items()):
        if type(value) not in _PLAIN_TYPES:
            object.__setattr__(options, name, plain_number(value))


def format_value(value: Any) -> str:
    """Format a value for an error message, with at most 100 characters."""
    try:
        return f"{value!r:.100}"
    except ValueError:  # Python does not format integers of more than a few thousand digits
        return "a number with too many digits"


def _check_number(
    name: str, value: Any, low: float, high: float, exclusive_low: bool = False
) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison, so it is rejected here too.
    if not is_number or not low <= value <= high or (exclusive_low and value == low):
        bracket = "(" if exclusive_low else "["
        raise InvalidRequest(
            f"{name} must be a number in {bracket}{low:g}, {high:g}], got {format_value(value)}"
        )


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {value!r:.100}")


def _check_integer(
    name: str, value: Any, low: int, high: int = _MAX_INT32, optional: bool = True
) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an integer, got {format_value(value)}")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, got {format_value(value)}")


def _as_tuple(name: str, value: Any, what: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    try:
        if isinstance(value, bytes | bytearray | Mapping):
            raise TypeError
        return tuple(value)
    except TypeError:
        raise InvalidRequest(f"{name} must be a list of {what}, got {value!r:.100}") from None


def _check_stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _as_tuple("stop", stop, "strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"stop may contain at most {MAX_STOP_STRINGS} strings, got {len(strings)}"
        )
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(f"stop must contain only non-empty strings, got {string!r:.100}")
        if len(string) > MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"stop may contain only strings of at most {MAX_STOP_LENGTH} characters"
            )
        _check_unicode("stop", string)
    return strings


def _check_stop_ids(ids: Any) -> tuple[int, ...]:
    found = _as_tuple("stop_token_ids", ids, "token ids")
    if len(found) > MAX_STOP_IDS:
        raise InvalidRequest(
            f"stop_token_ids may contain at most {MAX_STOP_IDS} ids, got {len(found)}"
        )
    found = tuple(plain_number(token) for token in found)
    for token in found:
        _check_integer("stop_token_ids: each id", token, 0, optional=False)
    return found


def _check_biases(given: Any) -> dict[int, float]:
    """Check the argument `logit_bias` and return biases by token id. In JSON, the ids are
    strings."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, got {given!r:.100}")
    items = list((given or {}).items())
    if len(items) > MAX_RULED_IDS:
        raise InvalidRequest(
            f"logit_bias may contain at most {MAX_RULED_IDS} ids, got {len(items)}"
        )
    found: dict[int, float] = {}
    for key, value in items:
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11
        token = int(key) if is_digits else plain_number(key)
        _check_integer("logit_bias: each token id", token, 0, optional=False)
        bias = plain_number(value)
        if bias is None:
            raise InvalidRequest(f"logit_bias[{token}] must be a number in [-100, 100], got None")
        _check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        found[token] = float(bias)
    return found


def _check_allowed_ids(given: Any) -> tuple[int, ...] | None:
    """Check the argument `allowed_token_ids` and return the ids, sorted and unique. None allows all
    ids."""
    if given is None:
        return None
    found = tuple(
        plain_number(token) for token in _as_tuple("allowed_token_ids", given, "token ids")
    )
    if not found:
        raise InvalidRequest(
            "allowed_token_ids must contain at least one token id; set it to None to allow "
            "all tokens"
        )
    if len(found) > MAX_RULED_IDS:
        raise InvalidRequest(
            f"allowed_token_ids may contain at most {MAX_RULED_IDS} ids, got {len(found)}"
        )
    for token in found:
        _check_integer("allowed_token_ids: each id", token, 0, optional=False)
    return tuple(sorted(set(found)))


def _check_bad_words(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        raise InvalidRequest(f"bad_words must be a list of strings, got {given!r:.100}")
    words = _as_tuple("bad_words", given, "strings")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words may contain at most {MAX_BAD_WORDS} strings, got {len(words)}"
        )
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise InvalidRequest(
                "bad_words must contain only strings that are neither empty nor blank, got "
                f"{word!r:.100}"
            )
        if len(word) > MAX_BAD_WORD_LENGTH:
            raise InvalidRequest(
                f"bad_words may contain only strings of at most {MAX_BAD_WORD_LENGTH} characters"
            )
        _check_unicode("bad_words", word)
    return words


def _check_structured_outputs(given: Any, ignore_eos: bool) -> StructuredOutputsParams | None:
    if given is None:
        return None
    if ignore_eos:
        raise InvalidRequest(
            "ignore_eos cannot be combined with structured_outputs, because the output ends "
            "when its grammar is complete"
        )
    return StructuredOutputsParams.of(given)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} must be valid Unicode: {error}") from None
