"""Top-k routing in Triton, and token-expert pairs grouped into blocks of one expert each.

Nothing is read back to the host, so steps of any size can be captured. A grid over blocks covers
the maximum number of blocks; programs of empty blocks return at once.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from nanoactor.models.weights.linear import Router

_FEW_TOKENS = 16
"""Maximum number of tokens for which each token reads the router's weights from L2."""
_CHUNKS = (256, 1024, 4096)
"""Numbers of pairs that may be read at once: the first that holds all pairs is used, or the
last."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def route(x: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operators.route`. Routing weights are rounded to the dtype of `x`."""
    (tokens, hidden), experts, chosen = x.shape, len(router.weight), router.chosen
    ids = torch.empty(tokens, chosen, dtype=torch.int32, device=x.device)
    shares = torch.empty(tokens, chosen, dtype=torch.float32, device=x.device)
    if not tokens:
        return ids, shares
    if tokens <= _FEW_TOKENS:
        logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
        _weigh[(tokens, triton.cdiv(experts, 4))](
            x.contiguous(),
            router.weight,
            logits,
            hidden=hidden,
            experts=experts,
            outputs=4,
            inputs=min(2048, triton.next_power_of_2(hidden)),
            num_warps=8,
        )
    else:
        logits = torch.mm(x.float(), router.weight.t())
    _route[(tokens,)](
        logits,
        ids,
        shares,
        experts,
        chosen=chosen,
        normalizes=router.normalizes,
        padded=triton.next_power_of_2(experts),
        slots=triton.next_power_of_2(chosen),
        rounded=_TYPES[x.dtype],
        num_warps=1,
    )
    return ids, shares


@triton.jit
def _weigh(
    x,
    weight,
    logits,
    hidden: tl.constexpr,
    experts: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """Compute a token's float32 router logits for some experts."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * outputs + tl.arange(0, outputs)
    total = tl.zeros([outputs], tl.float32)
    for begin in range(0, hidden, inputs):
        i = begin + tl.arange(0, inputs)
        values = tl.load(x + token * hidden + i, mask=i < hidden, other=0.0).to(tl.float32)
        there = (j[:, None] < experts) & (i[None, :] < hidden)
        found = tl.load(weight + j[:, None] * hidden + i[None, :], mask=there, other=0.0)
        total += tl.sum(found * values[None, :], 1)
    tl.store(logits + token * experts + j, total, mask=j < experts)


@triton.jit
def _route(
    logits,
    ids,
    shares,
    experts,
    chosen: tl.constexpr,
    normalizes: tl.constexpr,
    padded: tl.constexpr,
    slots: tl.constexpr,
    rounded: tl.constexpr,
):
    """Choose a token's most likely experts, ties to the lower id, and compute their softmax
    weights."""
    token = tl.program_id(0)
    expert = tl.arange(0, padded)
    there = expert < experts
    given = tl.load(logits + token * experts + expert, mask=there, other=float("-inf"))
    likely = tl.exp(given - tl.max(given, 0))
    likely = tl.where(there, likely / tl.sum(likely, 0), -1.0)
    slot = tl.arange(0, slots)
    best = tl.zeros([slots], tl.int32)
    values = tl.zeros([slots], tl.float32)
    for n in tl.static_range(chosen):
        highest = tl.max(likely, 0)
        # NaN equals nothing: such a token's result is NaN anyway, because of its own values.
        first = tl.min(tl.where(likely == highest, expert, padded - 1), 0)
        best = tl.where(slot == n, first, best)
        values = tl.where(slot == n, highest, values)
        likely = tl.where(expert == first, -2.0, likely)
    if normalizes:
        values = values / tl.sum(tl.where(slot < chosen, values, 0.0), 0)
    tl.store(ids + token * chosen + slot, tl.minimum(best, experts - 1), mask=slot < chosen)
    values = values.to(rounded).to(tl.float32)
    tl.store(shares + token * chosen + slot, values, mask=slot < chosen)


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """Token-expert pairs, in the order of tokens, in blocks of one expert each."""

    rows: torch.Tensor
    """Pair of each row, int32 (blocks * size,); the number of pairs if the row has none."""
    owners: torch.Tensor
    """Expert of each block, int32 (blocks,); -1 for unused blocks, which come last."""
    used: torch.Tensor
    """Number of blocks that have an expert, int32 (1,)."""


def blocks_of(ids: torch.Tensor, experts: int, size: int) -> Blocks:
    """Group the pairs of `ids`, int32 (tokens, chosen), into blocks of `size` rows."""
    pairs = ids.numel()
    blocks = min(pairs, experts + pairs // size)
    rows = torch.empty(blocks * size, dtype=torch.int32, device=ids.device)
    owners = torch.empty(blocks + 1, dtype=torch.int32, device=ids.device)
    _align[(experts,)](
        ids,
        rows,
        owners,
        pairs,
        blocks,
        experts=experts,
        padded=triton.next_power_of_2(experts + 1),
        size=size,
        chunk=next((chunk for chunk in _CHUNKS if pairs <= chunk), _CHUNKS[-1]),
        num_warps=8,
    )
    return Blocks(rows, owners[:-1], owners[-1:])


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _align(
    ids,
    rows,
    owners,
    pairs,
    blocks,
    experts: tl.constexpr,
    padded: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
):
    """Write the pairs of one expert, in order, to blocks of its own, and fill the rest of the last
    one with `pairs`. Unused blocks get owner -1. The number of used blocks is stored after the
    owners."""
    mine = tl.program_id(0)
    expert = tl.arange(0, padded)
    counts = tl.zeros([padded], tl.int32)
    for begin in range(0, pairs, chunk):
        at = begin + tl.arange(0, chunk)
        counts += tl.histogram(tl.load(ids + at, mask=at < pairs, other=experts), padded)
    filled = (counts + size - 1) // size
    first = tl.sum(tl.where(expert < mine, filled, 0), 0)
    own = tl.sum(tl.where(expert == mine, filled, 0), 0)
    total = tl.sum(tl.where(expert == mine, counts, 0), 0)
    before = 0
    for begin in range(0, pairs, chunk):
        at = begin + tl.arange(0, chunk)
        id_ = tl.load(ids + at, mask=at < pairs, other=-1)
        member = (id_ == mine).to(tl.int32)
        place = first * size + before + tl.cumsum(member, 0) - 1
        tl.store(rows + place, at, mask=member > 0)
        before += tl.sum(member, 0)
    rest = total + tl.arange(0, size)
    tl.store(rows + first * size + rest, tl.zeros([size], tl.int32) + pairs, mask=rest < own * size)
    for begin in range(0, own, size):
        number = begin + tl.arange(0, size)
        tl.store(owners + first + number, tl.zeros([size], tl.int32) + mine, mask=number < own)
    if mine == experts - 1:
        tl.store(owners + blocks, first + own)
        for begin in range(first + own, blocks, size):
            number = begin + tl.arange(0, size)
            tl.store(owners + number, tl.zeros([size], tl.int32) - 1, mask=number < blocks)
