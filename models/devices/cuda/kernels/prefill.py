"""Prefill attention on one GPU. The GPU, the model and the step determine which kernel runs."""

from __future__ import annotations

import functools

import torch
import triton

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.devices.cuda.kernels.prefill_attention import (
    prefill_attention,
    tokens_per_program,
)
from nanoactor.models.devices.cuda.kernels.prefill_attention_tma import (
    NARROW,
    WIDE,
    SplitBuffers,
    Variant,
    prefill_attention_tma,
)

HOPPER = 9
_HEAD_DIMS = (64, 128)
"""Head sizes for which the `WIDE` variant has enough registers and TMA can copy whole keys."""


def unsupported_reason(
    capability: tuple[int, int], dtype: torch.dtype, block_size: int, head_dim: int
) -> str | None:
    """Return why the kernel for Hopper GPUs, which loads keys and values by TMA, cannot be used, or
    None if it can.

    TMA loads a tile of adjacent keys at a time, so a cache block must contain a whole number of
    tiles.
    """
    if capability[0] != HOPPER:
        return f"compute capability {capability[0]}.{capability[1]} is not 9.0 (Hopper)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')} products are exact and use no tensor cores"
    if head_dim not in _HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, _HEAD_DIMS))}"
    if block_size % WIDE.tile:
        return f"block_size {block_size} is not a multiple of {WIDE.tile}"
    return None


class PrefillAttention:
    """Prefill attention, as a function that chooses the kernel for each step."""

    def __init__(
        self,
        capability: tuple[int, int],
        multiprocessors: int,
        variants: tuple[Variant, Variant] = (WIDE, NARROW),
    ) -> None:
        """Store the settings. `variants` are the TMA kernel's variants for many and for few
        programs."""
        self.capability = capability
        self._multiprocessors, self._variants = multiprocessors, variants
        self._compiled_shapes: set[tuple[object, ...]] = set()
        self._split_buffers: dict[int, SplitBuffers] = {}
        """Memory of the narrow variant, by head size. Captured steps refer to it."""
        self.unsupported_reason = functools.cache(functools.partial(unsupported_reason, capability))

    def __call__(
        self,
        queries: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """Write the attention output of the prompt tokens to `output`, which has the shape of
        `queries`, (tokens, heads, head_dim)."""
        heads, size = queries.shape[1:]
        block_size, kv_heads = cache.keys.shape[1:3]
        if self.unsupported_reason(queries.dtype, block_size, size) is not None:
            tables, rows, tiles = batch.tables, batch.prefill_rows, batch.prefill_tiles
            prefill_attention(queries, cache, tables, rows, tiles, scale, output)
            return
        variant = self.variant(batch.prefill_tokens, heads, kv_heads)
        shape = (queries.dtype, heads, kv_heads, size, block_size)
        if shape not in self._compiled_shapes:
            # The first step compiles both variants, so that prompts of other lengths do not wait.
            self._compiled_shapes.add(shape)
            wide, narrow = self._variants
            if size not in self._split_buffers:
                programs = SplitBuffers.max_programs(self._multiprocessors)
                self._split_buffers[size] = SplitBuffers.empty(
                    programs, narrow, size, queries.device
                )
            prefill_attention_tma(queries, cache, batch, scale, output, wide)
            prefill_attention_tma(
                queries, cache, batch, scale, output, narrow, self._split_buffers[size]
            )
        buffers = self._split_buffers[size] if variant is self._variants[1] else None
        prefill_attention_tma(queries, cache, batch, scale, output, variant, buffers)

    def variant(self, tokens: int, heads: int, kv_heads: int) -> Variant:
        """Return the narrow variant if the wide one would run at most one program per
        multiprocessor, else the wide one.

        The spare programs that captured steps have for more prompts are not counted, because they
        return at once.
        """
        wide, narrow = self._variants
        programs = triton.cdiv(tokens, tokens_per_program(heads, kv_heads)) * kv_heads
        return narrow if programs <= self._multiprocessors else wide
