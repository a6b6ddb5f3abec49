"""Hashes of the contents of full blocks, which the prefix cache uses to find equal prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16


def block_hash(parent: bytes, tokens: NDArray[np.int32], salt: bytes, extra: bytes = b"") -> bytes:
    """Return the 128-bit hash of a block, which depends on every token up to the end of the block.

    `parent` is the hash of the preceding block, empty for the first one. `salt` (16 to 64 bytes,
    the same for all blocks of an engine) keeps outsiders from constructing collisions. `extra`
    distinguishes blocks with equal token ids but different meanings, such as the placeholders of
    two images.
    """
    digest = hashlib.blake2b(parent, digest_size=HASH_BYTES, key=salt)
    digest.update(np.ascontiguousarray(tokens, np.int32).tobytes())
    digest.update(extra)
    return digest.digest()


def block_hashes(
    tokens: NDArray[np.int32],
    block_size: int,
    salt: bytes,
    parent: bytes = b"",
    extras: Mapping[int, bytes] = MappingProxyType({}),
) -> NDArray[np.uint8]:
    """Return the chained hashes of all full blocks of `tokens` (int32), uint8 (full blocks, 16).
    `parent` is the hash of the block before `tokens`. `extras` maps block indices to the `extra`
    argument of `block_hash`."""
    hashes = bytearray()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        extra = extras.get(start // block_size, b"")
        parent = block_hash(parent, tokens[start : start + block_size], salt, extra)
        hashes += parent
    return np.frombuffer(bytes(hashes), np.uint8).reshape(-1, HASH_BYTES)
