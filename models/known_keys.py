"""The keys that a `config.json` may contain: those that are read, and those that do not affect
results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.families.family import Family

_READ_KEYS = frozenset(
    [
        "architectures",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    ]
)
_IMAGE_KEYS = frozenset(
    [
        "image_token_id",
        "text_config",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
    ]
)
"""Keys that are read if the family accepts images."""
_WINDOW_KEYS = frozenset(["max_window_layers", "sliding_window"])
"""Keys without effect if the family has a switch for windows, which must be off."""
_IGNORED_KEYS = frozenset(
    [
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "model_name",
        "model_type",
        "mrope_interleaved",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_mrope",
    ]
)
"""Keys that do not affect results. They concern training, returned values, the tokenizer, and
generation settings, which transformers reads from `generation_config.json` instead."""
_NEUTRAL_VALUES: Mapping[str, Any] = {
    "embedding_multiplier": 1,
    "logit_scale": 1,
    "logits_scaling": 1,
    "residual_multiplier": 1,
    "scale_emb": 1,
}
"""Keys of related models, each with the value that has no effect."""
_EMPTY_VALUES: tuple[Any, ...] = (None, False, "", [], {})


_ROPE_KEYS = frozenset(
    [
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "finetuned",
        "high_freq_factor",
        "low_freq_factor",
        "mrope_interleaved",
        "mrope_section",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    ]
)
_VISION_KEYS = frozenset(
    [
        "deepstack_visual_indexes",
        "depth",
        "hidden_act",
        "hidden_size",
        "in_channels",
        "intermediate_size",
        "num_heads",
        "num_position_embeddings",
        "out_hidden_size",
        "patch_size",
        "rope_parameters",
        "spatial_merge_size",
        "temporal_patch_size",
    ]
)


def check_keys(raw: Mapping[str, Any], family: Family, origin: object) -> None:
    """Raise `UnsupportedModel` for an unknown key, because it may change what the model computes.

    An unknown key is accepted if its value is empty or known to have no effect, or if it starts
    with an underscore, which marks metadata written by transformers. The nested objects about
    rotary embeddings and the vision tower are checked in the same way.
    """
    options = (getattr(family, field.name) for field in dataclasses.fields(family))
    allowed = (
        _READ_KEYS | {option for option in options if isinstance(option, str)} | family.option_keys
    )
    if family.vision_prefix is not None:
        allowed |= _IMAGE_KEYS
    if family.window_switch is not None:
        allowed |= _WINDOW_KEYS
    _check(raw, allowed, family, origin)
    for name, nested_keys in (("rope_parameters", _ROPE_KEYS), ("rope_scaling", _ROPE_KEYS)):
        _check_nested(raw, name, nested_keys, family, origin)
    _check_nested(raw, "vision_config", _VISION_KEYS, family, origin)


def _check_nested(
    raw: Mapping[str, Any], name: str, allowed: frozenset[str], family: Family, origin: object
) -> None:
    if isinstance(raw.get(name), dict):
        _check(raw[name], allowed, family, f"{origin}: {name}")


def _check(
    raw: Mapping[str, Any], read_keys: frozenset[str], family: Family, origin: object
) -> None:
    allowed = read_keys | _IGNORED_KEYS | {"architectures", "dtype", "torch_dtype"}
    for name, value in raw.items():
        if (
            name in allowed
            or name.startswith("_")
            or any(value is empty for empty in _EMPTY_VALUES[:2])
        ):
            continue
        if value in _EMPTY_VALUES or (name in _NEUTRAL_VALUES and value == _NEUTRAL_VALUES[name]):
            continue
        raise UnsupportedModel(
            f"{origin}: the key {name!r:.100} (value {value!r:.60}) is not known for "
            f"{family.architecture} and may change what the model computes; if it does not, "
            "remove it from the file"
        )
