"""Parsing of a model's configuration from a Hugging Face `config.json`. Imports no torch."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoactor.models.errors import ModelError, UnsupportedModel
from nanoactor.models.families.family import Family, Option
from nanoactor.models.families.qwen3 import QWEN3
from nanoactor.models.families.registry import HEADLESS_FAMILIES, family_of
from nanoactor.models.fields import (
    read_bool,
    read_non_negative_number,
    read_number,
    read_positive_int,
    read_positive_number,
)
from nanoactor.models.known_keys import check_keys
from nanoactor.models.model_config import ModelConfig, Quantization, RopeConfig, Scales
from nanoactor.models.vision.config import parse_vision
from nanoactor.models.weights.formats import FORMATS

DTYPES = ("float32", "bfloat16", "float16")
_ROPE_OBJECTS = ("rope_parameters", "rope_scaling")


def check_file(path: Path) -> None:
    """Raise `ModelError` unless `path` is a regular file. Reading a pipe would block, and reading a
    device might never end."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise ModelError(
                f"{path} is a link to {path.readlink()}, which does not exist"
            ) from None
        raise ModelError(f"{path} does not exist") from None
    except OSError as error:  # such as a link to itself
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path} is not a regular file")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `ModelError` if the file is missing, malformed, or
    does not contain an object."""
    check_file(path)
    try:
        # Some editors write a byte order mark at the start of a file.
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    except RecursionError:
        raise ModelError(f"the JSON in {path} is nested too deeply") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not contain a JSON object")
    return content


def read_config(directory: Path) -> ModelConfig:
    """Return the configuration in `config.json` in `directory`.

    Raises `ModelError` if the file or a required value is missing or a value is invalid, and
    `UnsupportedModel` if the configuration requires something that is not implemented.
    """
    return parse_config(read_json(directory / "config.json"), directory / "config.json")


def parse_config(raw: Mapping[str, Any], origin: object = "config") -> ModelConfig:
    """Return the configuration in `raw`, the parsed JSON object. `origin` names its source in error
    messages. Raises the same errors as `read_config`."""
    architectures = raw.get("architectures") or [""]
    if not isinstance(architectures, list):
        raise ModelError(f"{origin}: architectures must be a list, got {architectures!r}")
    # The architecture comes first: an unsupported one's file may lack or nest all other keys.
    family = family_of(str(architectures[0])) if raw.get("architectures") else QWEN3
    vision = parse_vision(raw, origin) if family.vision_prefix else None
    raw = _text_config(raw, family, origin)
    check_keys(raw, family, origin)

    def option(name: str) -> bool:
        setting: Option = getattr(family, name)
        return read_bool(raw, setting, origin, False) if isinstance(setting, str) else setting

    heads = read_positive_int(raw, "num_attention_heads", origin)
    hidden = read_positive_int(raw, "hidden_size", origin)
    config = ModelConfig(
        architecture=str(architectures[0]),
        vocab_size=read_positive_int(raw, "vocab_size", origin),
        hidden_size=hidden,
        intermediate_size=read_positive_int(raw, "intermediate_size", origin),
        num_layers=read_positive_int(raw, "num_hidden_layers", origin),
        num_heads=heads,
        num_kv_heads=read_positive_int(raw, "num_key_value_heads", origin, heads),
        head_dim=read_positive_int(raw, "head_dim", origin, family.head_dim or hidden // heads),
        max_positions=read_positive_int(raw, "max_position_embeddings", origin),
        rms_norm_eps=read_non_negative_number(raw, "rms_norm_eps", origin, 1e-6),
        rope=_read_rope(raw, family, origin),
        qk_norm=family.qk_norm,
        qkv_bias=option("qkv_bias"),
        output_bias=option("output_bias"),
        mlp_bias=option("mlp_bias"),
        tie_embeddings=read_bool(raw, "tie_word_embeddings", origin, False),
        dtype=_read_dtype(raw),
        eos_token_ids=parse_token_ids(raw.get("eos_token_id"), origin),
        vision=vision,
        has_head=str(architectures[0]) not in HEADLESS_FAMILIES,
        scales=_read_scales(raw, family, origin),
        window=_read_window(raw, family, origin),
        quantization=_read_quantization(raw, origin),
        family_options=family.read_options(raw, origin) if family.read_options else None,
    )
    _check_supported(raw, config, family, origin)
    return config


def _read_scales(raw: Mapping[str, Any], family: Family, origin: object) -> Scales:
    def scale(key: str | None) -> float:
        return 1.0 if key is None else read_positive_number(raw, key, origin, 1.0)

    attention = family.attention_scale
    return Scales(
        embedding=scale(family.embedding_scale),
        residual=scale(family.residual_scale),
        attention=None if attention is None else scale(attention),
        logits_divisor=scale(family.logits_divisor),
    )


def _read_window(raw: Mapping[str, Any], family: Family, origin: object) -> int | None:
    """Return the number of most recent positions that a token attends to, or None for no limit."""
    key = family.sliding_window
    if key is None:
        return None
    if key in raw and raw[key] is None:
        return None
    return read_positive_int(raw, key, origin, family.default_window)


def _read_quantization(raw: Mapping[str, Any], origin: object) -> Quantization | None:
    """Return the quantization, or None if the weights are not quantized. Raises `UnsupportedModel`
    for an unknown method."""
    section = raw.get("quantization_config")
    if not section:
        return None
    if not isinstance(section, dict):
        raise ModelError(f"{origin}: quantization_config must be an object, got {section!r:.50}")
    method = section.get("quant_method")
    if method not in FORMATS:
        supported = f"; supported methods: {', '.join(FORMATS)}" if FORMATS else ""
        raise UnsupportedModel(
            f"{origin}: quantization_config has quant_method {method!r:.50}, which is not "
            f"supported{supported}"
        )
    return Quantization(str(method), section)


def _text_config(raw: Mapping[str, Any], family: Family, origin: object) -> Mapping[str, Any]:
    """Return the settings of the decoder, which some families nest in an object within `raw`."""
    if family.text_config is None:
        return raw
    text = raw.get(family.text_config)
    if not isinstance(text, dict):
        raise ModelError(f"{origin}: {family.text_config} must be an object, got {text!r:.50}")
    # The whole model's flag decides whether weights are tied; the text part's flag is ignored.
    return {**raw, **text, "tie_word_embeddings": raw.get("tie_word_embeddings")}


def parse_token_ids(value: Any, origin: object = "eos_token_id") -> tuple[int, ...]:
    """Return the token ids in the value of `eos_token_id`: None, an integer or a list of integers.

    None and -1 mean that there are no ids. Raises `ModelError` for any other value; `origin` names
    its source in the message.
    """
    values = [] if value in (None, -1) else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise ModelError(
            f"{origin}: eos_token_id must be an integer or a list of integers, got {value!r}"
        )
    return tuple(values)


def _read_dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(
            f"dtype {name!r} is not supported; the supported dtypes are {', '.join(DTYPES)}"
        )
    return name


def _read_rope(raw: Mapping[str, Any], family: Family, origin: object) -> RopeConfig:
    # transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling.
    # If a file has both objects, a user has added rope_scaling by hand, so it takes precedence.
    raw_rope = {
        name: value
        for key in _ROPE_OBJECTS
        for name, value in _read_rope_object(raw, key, origin).items()
    }
    kind = str(raw_rope.get("rope_type") or "default")
    if kind == "default" and raw_rope.get("factor") not in (None, 1):
        raise ModelError(f"{origin}: a rope factor requires a rope_type, for example 'yarn'")
    theta = read_positive_number({**raw, **raw_rope}, "rope_theta", origin, family.rope_theta)
    sections = _read_sections(raw_rope, origin) if family.vision_prefix else None
    if kind == "default":
        return RopeConfig(kind, theta, sections=sections)
    if kind not in ("linear", "yarn", "llama3"):
        reason = " (it makes results depend on how a prompt is chunked)" * (kind == "dynamic")
        raise UnsupportedModel(
            f"{origin}: rope type {kind!r} is not supported{reason}; the supported types are "
            "default, linear, yarn and llama3"
        )
    factor = raw_rope.get("factor")
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if factor is None or not is_number or not 1 <= factor < math.inf:
        raise ModelError(
            f"{origin}: rope type {kind!r} requires a factor of at least 1, got {factor!r}"
        )
    max_positions = read_positive_int(raw, "max_position_embeddings", origin)
    original_max_positions = read_positive_int(
        raw_rope, "original_max_position_embeddings", origin, max_positions
    )

    def read_optional(key: str) -> float | None:
        return None if raw_rope.get(key) is None else read_number(raw_rope, key, origin, 0.0)

    config = RopeConfig(
        kind,
        theta=theta,
        factor=float(factor),
        original_max_positions=original_max_positions,
        has_original_max_positions=raw_rope.get("original_max_position_embeddings") is not None,
        beta_fast=read_positive_number(raw_rope, "beta_fast", origin, 32.0),
        beta_slow=read_positive_number(raw_rope, "beta_slow", origin, 1.0),
        attention_factor=read_optional("attention_factor"),
        mscale=read_optional("mscale"),
        mscale_all_dim=read_optional("mscale_all_dim"),
        truncate=read_bool(raw_rope, "truncate", origin, True),
        low_freq_factor=read_positive_number(raw_rope, "low_freq_factor", origin, 1.0),
        high_freq_factor=read_positive_number(raw_rope, "high_freq_factor", origin, 4.0),
        sections=sections,
    )
    if kind == "yarn":
        _check_yarn(config, origin)
    if kind == "llama3" and config.high_freq_factor <= config.low_freq_factor:
        raise ModelError(
            f"{origin}: high_freq_factor must be greater than low_freq_factor, got "
            f"{config.high_freq_factor:g} and {config.low_freq_factor:g}"
        )
    return config


def _read_sections(raw_rope: Mapping[str, Any], origin: object) -> tuple[int, int, int]:
    """Return the M-RoPE sections: the numbers of rotary frequencies for time, height and width.
    `mrope_interleaved` is ignored, as in transformers."""
    value = raw_rope.get("mrope_section", [24, 20, 20])
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 3 or not all(type(size) is int and size >= 0 for size in sizes):
        raise ModelError(f"{origin}: mrope_section must be three integers, got {value!r}")
    return sizes[0], sizes[1], sizes[2]


def _check_yarn(config: RopeConfig, origin: object) -> None:
    """Raise `ModelError` if YaRN's scaling cannot be computed from the parameters in `config`."""
    if config.attention_factor is not None and config.attention_factor <= 0:
        raise ModelError(
            f"{origin}: attention_factor must be greater than 0, got {config.attention_factor:g}"
        )
    if config.theta == 1.0:
        raise ModelError(f"{origin}: rope type 'yarn' requires a rope_theta other than 1")
    if config.beta_fast <= config.beta_slow:
        raise ModelError(
            f"{origin}: beta_fast must be greater than beta_slow, got {config.beta_fast:g} and "
            f"{config.beta_slow:g}"
        )


def _read_rope_object(raw: Mapping[str, Any], key: str, origin: object) -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ModelError(f"{origin}: {key} must be an object, got {value!r}")
    if "type" in value:  # the older name of the key
        value = {"rope_type": value["type"], **value}
    return value


def _check_supported(
    raw: Mapping[str, Any], config: ModelConfig, family: Family, origin: object
) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(
            f"{origin}: hidden_act is {raw['hidden_act']!r}, but only silu is supported"
        )
    switch = family.window_switch
    if switch is not None and raw.get(switch):
        raise UnsupportedModel(
            f"{origin}: {switch} must be false, because sliding-window attention is not supported"
        )
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ModelError(f"{origin}: layer_types must be a list, got {kinds!r:.50}")
    unsupported = [kind for kind in kinds if kind != "full_attention"]
    if unsupported:
        raise UnsupportedModel(
            f"{origin}: layer_types contains {unsupported[0]!r}, but only 'full_attention' is "
            "supported"
        )
    for section in (raw, *(_read_rope_object(raw, key, origin) for key in _ROPE_OBJECTS)):
        if section.get("partial_rotary_factor") not in (None, 1):
            raise UnsupportedModel(
                f"{origin}: partial_rotary_factor must be 1; other values are not supported"
            )
    _check_vision(config, origin)
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{origin}: num_attention_heads {config.num_heads} must be a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelError(f"{origin}: head_dim must be even, got {config.head_dim}")


def _check_vision(config: ModelConfig, origin: object) -> None:
    vision = config.vision
    if vision is None:
        return
    if vision.out_hidden_size != config.hidden_size:
        raise ModelError(
            f"{origin}: the vision tower's out_hidden_size {vision.out_hidden_size} must be equal "
            f"to the decoder's hidden_size {config.hidden_size}"
        )
    ids = (vision.image_token_id, vision.video_token_id)
    if max(*ids, vision.start_token_id, vision.end_token_id) >= config.vocab_size:
        raise ModelError(
            f"{origin}: the image and video token ids, {ids}, and vision_start_token_id and "
            f"vision_end_token_id must be less than vocab_size {config.vocab_size}"
        )
    if len(vision.deepstack_layers) > config.num_layers:
        raise ModelError(
            f"{origin}: deepstack_visual_indexes has {len(vision.deepstack_layers)} entries, but "
            f"the decoder has only {config.num_layers} layers"
        )
