"""Qwen2 and Qwen2.5, dense models, which have biases on queries, keys and values only.

Source: Qwen2.5 Technical Report, arXiv:2412.15115; options as in transformers' `Qwen2Config`.
Models with sliding windows in some layers (`use_sliding_window`) are refused.
"""

from __future__ import annotations

from nanoactor.models.families.family import Family

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    window_switch="use_sliding_window",
)
