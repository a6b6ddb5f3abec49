"""Qwen3, dense: grouped-query attention with normalized queries and keys.

Source: Qwen3 Technical Report, arXiv:2505.09388; options as in transformers' `Qwen3Config`.
"""

from __future__ import annotations

from nanoactor.models.families.family import Family

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    head_dim=128,
    qk_norm=True,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    window_switch="use_sliding_window",
)
