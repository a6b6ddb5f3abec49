"""A model's `generation_config.json`: the sampling defaults that the model's authors recommend, and
detection of the settings that the engine cannot apply."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoactor.errors import InvalidConfig, InvalidRequest
from nanoactor.models.config import parse_token_ids, read_json
from nanoactor.models.errors import ModelError
from nanoactor.models.fields import read_bool, read_positive_int
from nanoactor.models.sampling.columns import DEFAULTS
from nanoactor.requests.params import SamplingParams

FILE = "generation_config.json"
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "assistant_confidence_threshold": (0.4,),
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": (),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "length_penalty": (1.0,),
    "max_length": (20,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (1.0,),
    "typical_p": (1.0,),
    "watermarking_config": (),
}
"""Settings of transformers that the engine does not apply, and the values, other than null, with
which each setting has no effect."""
IGNORED = frozenset(
    (
        "_from_model_config",
        "assistant_early_exit",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "decoder_start_token_id",
        "disable_compile",
        "is_assistant",
        "low_memory",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "return_dict_in_generate",
        "return_legacy_cache",
        "target_lookbehind",
        "transformers_version",
        "use_cache",
        "use_model_defaults",
    )
)
"""Settings that are ignored because they do not change the generated tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The settings of a `generation_config.json` that the engine applies, and the names of those
    that it does not support."""

    sampling: Mapping[str, float]
    """Default of each sampling parameter, by name. The names are those in
    `nanoactor.models.sampling.columns.DEFAULTS`."""
    eos_token_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None
    """Maximum number of output tokens for requests that do not set one; None if the file does not
    set it either."""
    not_applied: tuple[str, ...] = ()
    """Names of settings that would change the output but are not supported."""

    def without_recommendations(self) -> GenerationConfig:
        """Return a configuration with vLLM's default sampling parameters and this file's
        end-of-sequence ids."""
        return GenerationConfig(DEFAULTS, self.eos_token_ids)

    def overridden(self, settings: Mapping[str, Any]) -> GenerationConfig:
        """Return this configuration overridden by `settings`, whose keys are those of
        `generation_config.json`.

        Raises `InvalidConfig` for a setting that is not supported or has an invalid value.
        """
        try:
            parsed = parse_generation_config(settings, "override_generation_config")
        except ModelError as error:
            raise InvalidConfig(str(error)) from None
        if parsed.not_applied:
            raise InvalidConfig(
                f"override_generation_config: the setting {parsed.not_applied[0]!r:.100} is not "
                "supported"
            )
        given = {name for name in DEFAULTS if settings.get(name) is not None}
        given |= {"temperature"} if settings.get("do_sample") is False else set()
        return GenerationConfig(
            {**self.sampling, **{name: parsed.sampling[name] for name in given}},
            parsed.eos_token_ids or self.eos_token_ids,
            parsed.max_new_tokens or self.max_new_tokens,
            self.not_applied,
        )


def read_generation_config(directory: Path) -> GenerationConfig:
    """Read the `generation_config.json` in a model's directory; a missing file counts as empty.
    Raises `ModelError` for invalid values."""
    path = directory / FILE
    return parse_generation_config(read_json(path) if path.exists() else {}, path)


def parse_generation_config(raw: Mapping[str, Any], origin: object = FILE) -> GenerationConfig:
    """Return the configuration in `raw`, the parsed JSON object. `origin` names the source of the
    settings in error messages. Raises `ModelError` for invalid values."""
    applied = {*DEFAULTS, "do_sample", "eos_token_id", "max_new_tokens"}
    return GenerationConfig(
        sampling=_sampling(raw, origin),
        eos_token_ids=parse_token_ids(raw.get("eos_token_id"), origin),
        max_new_tokens=_optional_positive(raw, "max_new_tokens", origin),
        not_applied=tuple(
            name
            for name, value in raw.items()
            if name not in applied | IGNORED and not _is_neutral(name, value)
        ),
    )


def _optional_positive(raw: Mapping[str, Any], name: str, origin: object) -> int | None:
    return None if raw.get(name) is None else read_positive_int(raw, name, origin)


def _is_neutral(name: str, value: Any) -> bool:
    return value is None or value in NEUTRAL.get(name, ())


def _sampling(raw: Mapping[str, Any], origin: object) -> Mapping[str, float]:
    given = {name: raw[name] for name in DEFAULTS if raw.get(name) is not None}
    try:
        SamplingParams(**given)
    except InvalidRequest as error:
        raise ModelError(f"{origin}: {error}") from error
    if not read_bool(raw, "do_sample", origin, True):
        penalty = given.get("repetition_penalty", DEFAULTS["repetition_penalty"])
        return {**DEFAULTS, "temperature": 0.0, "repetition_penalty": penalty}
    return {**DEFAULTS, **given}
