"""Masks of allowed token ids, one bit per id, as produced by a grammar."""

from __future__ import annotations

import torch

BITS = 32


class TokenMasks:
    """Applies masks on one device.

    A constant of 32 powers of two extracts each word's bits: a shift of one tensor by another has a
    kernel on fewer devices (Huawei documents none for NPUs before the A2).
    """

    def __init__(self, device: torch.device) -> None:
        bits = [1 << bit for bit in range(BITS - 1)]
        self._bits = torch.tensor([*bits, -1 << (BITS - 1)], dtype=torch.int32, device=device)

    def apply(self, logits: torch.Tensor, masks: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return logits, float32 (rows, ids), with minus infinity for ids that are not allowed.

        `masks` are int32 (rows, words): bit t % 32 of word t // 32 is set if id t may be chosen.
        The first logit is that of id `start`.
        """
        first, ids = start // BITS, logits.shape[-1]
        words = masks[:, first : -(-(start + ids) // BITS)]
        bits = torch.bitwise_and(words.unsqueeze(-1), self._bits).flatten(1)
        allowed = bits.narrow(1, start - first * BITS, ids)
        return logits.float().masked_fill(allowed == 0, float("-inf"))
