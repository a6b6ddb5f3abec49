"""Qwen3-VL, dense: Qwen3 with a vision tower.

Source: Qwen3-VL Technical Report, arXiv:2511.21631; options as in transformers' `Qwen3VLConfig`.
"""

from __future__ import annotations

import dataclasses

from nanoactor.models.families.qwen3 import QWEN3

QWEN3_VL = dataclasses.replace(
    QWEN3,
    architecture="Qwen3VLForConditionalGeneration",
    rope_theta=500_000.0,
    text_config="text_config",
    text_prefix="model.language_model",
    vision_prefix="model.visual",
)
