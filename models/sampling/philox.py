"""Philox 4x32-10, a random number generator, in integer tensor operations.

It computes random bits from a counter and a key, so the same (seed, position, token id) gives the
same bits on every device and in every batch. Source: J. K. Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _multiply(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (high, low) 32-bit halves of the product of two 32-bit words.

    The product may overflow int64, but wraps around and so keeps its 64 bits. The masks extract the
    halves.
    """
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return four random 32-bit words, as int64 tensors, for each counter and key. The arguments
    are broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32, computed from 32-bit words. 23 of the bits form a
    number between 0 and 1."""
    uniform = ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _key(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the Gumbel noise of every token id, float32 (rows, vocabulary). `seeds` and
    `positions` are int64 (rows,)."""
    groups = torch.arange((vocabulary + 3) // 4, device=seeds.device)[None]
    position = positions[:, None]
    zero = torch.zeros_like(position)
    words = philox((groups, position & _MASK, position >> 32, zero), _key(seeds))
    noise = torch.stack([word.expand(len(seeds), -1) for word in words], dim=-1)
    return _gumbel(noise.reshape(len(seeds), -1)[:, :vocabulary])


def gumbel_noise_at(
    seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the noise of `gumbel_noise` for some token ids only, in the shape of `ids`, (rows,
    candidates)."""
    position = positions[:, None]
    zero = torch.zeros_like(position)
    words = philox((ids >> 2, position & _MASK, position >> 32, zero), _key(seeds))
    stacked = torch.stack([word.expand_as(ids) for word in words], dim=-1)
    return _gumbel(stacked.gather(-1, (ids & 3)[..., None]).squeeze(-1))
