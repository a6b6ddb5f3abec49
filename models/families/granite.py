"""Granite 3 and 4, dense models: Llama with factors on embeddings, residuals, attention and logits.

The factors are those of maximal update parametrization; source: "Power Scheduler",
arXiv:2408.13359. The options are those of transformers' `GraniteConfig`.
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
