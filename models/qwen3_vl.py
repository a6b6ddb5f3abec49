"""Qwen3-VL, dense: Qwen3 behind a vision tower.

Source: Qwen3-VL Technical Report, arXiv:2511.21631; options as in transformers' `Qwen3VLConfig`.
"""

from __future__ import annotations

from nanoactor.models.family import Family

QWEN3_VL = Family(
    architecture="Qwen3VLForConditionalGeneration",
    head_dim=128,
    qk_norm=True,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    text_config="text_config",
    text_prefix="model.language_model",
    vision_prefix="model.visual",
)
