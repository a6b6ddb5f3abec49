"""Granite 3 and 4, dense: Llama with factors on embeddings, residuals, attention and logits.

Source: "Power Scheduler", arXiv:2408.13359, for the factors, which are those of maximal update
parametrization; options as in transformers' `GraniteConfig`.
"""

from __future__ import annotations

import dataclasses

from nanoactor.models.families.llama import LLAMA

GRANITE = dataclasses.replace(
    LLAMA,
    architecture="GraniteForCausalLM",
    embedding_scale="embedding_multiplier",
    residual_scale="residual_multiplier",
    attention_scale="attention_multiplier",
    logits_divisor="logits_scaling",
)
