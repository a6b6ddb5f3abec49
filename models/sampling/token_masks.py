"""Masks of allowed token ids, one bit per id, as a grammar produces them."""

from __future__ import annotations

import torch

BITS = 32


class TokenMasks:
    """Applies masks of allowed token ids on one device.

    Bits are extracted with a constant tensor of 32 powers of two, because fewer devices have a
    kernel that shifts one tensor by another (Huawei documents none for NPUs before the A2).
    """

    def __init__(self, device: torch.device) -> None:
        bits = [1 << bit for bit in range(BITS - 1)]
        self._bits = torch.tensor([*bits, -1 << (BITS - 1)], dtype=torch.int32, device=device)

    def apply(self, logits: torch.Tensor, masks: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return `logits` as float32 (rows, ids), with minus infinity for ids that are not allowed.

        `masks` is int32 (rows, words): bit t % 32 of word t // 32 is set if id t may be chosen. The
        first column of `logits` is token id `start`.
        """
        first, ids = start // BITS, logits.shape[-1]
        words = masks[:, first : -(-(start + ids) // BITS)]
        bits = torch.bitwise_and(words.unsqueeze(-1), self._bits).flatten(1)
        allowed = bits.narrow(1, start - first * BITS, ids)
        return logits.float().masked_fill(allowed == 0, float("-inf"))
