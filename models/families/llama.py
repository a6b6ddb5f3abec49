"""Llama 2 and 3.x, and other models of the same architecture.

Source: arXiv:2307.09288, arXiv:2407.21783; options as in transformers' `LlamaConfig`. Llama 3.1 and
later scale positions with the rope type `llama3`, implemented in `nanoactor.models.layers.rope`.
"""

from __future__ import annotations

from nanoactor.models.families.family import Family

LLAMA = Family(
    architecture="LlamaForCausalLM",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)
