"""Mistral 7B, Nemo and Small, dense.

Source: Mistral 7B, arXiv:2310.06825; options as in transformers' `MistralConfig`, which treats a
missing `sliding_window` as 4,096. Sequences are never longer than the window, so every token
attends to all tokens before it.
"""

from __future__ import annotations

from nanoactor.models.families.family import Family

MISTRAL = Family(
    architecture="MistralForCausalLM",
    sliding_window="sliding_window",
    default_window=4096,
)
