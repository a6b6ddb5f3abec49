"""Mixtures of experts in Triton: a router's choice, and grouped products whose sizes the device
alone knows. Nothing is read back, so steps of any size are captured.

Pairs of a token and one of its experts are put into blocks, each of one expert. A grid covers as
many blocks as there may be; those that are not filled end at once. So for a few tokens the bytes of
the chosen experts alone are read.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from nanoactor.models.weights.linear import DenseExperts


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """The shape of a program's work."""

    rows: int
    """Pairs of token and expert in a block."""
    outputs: int
    inputs: int
    warps: int
    stages: int


# By pairs for each expert, up to the first number: few read bytes, many multiply.
_TILES = (
    (8, Tile(16, 32, 128, 4, 4)),
    (32, Tile(32, 64, 64, 4, 4)),
    (96, Tile(64, 128, 64, 4, 3)),
)
_LARGEST = Tile(128, 128, 64, 8, 3)
_LARGEST_FLOAT32 = Tile(32, 32, 32, 4, 2)
_CHUNK = 256


def tile_for(pairs: int, experts: int, dtype: torch.dtype) -> Tile:
    """Return the tile for so many pairs over so many experts."""
    if dtype == torch.float32:
        return dataclasses.replace(_LARGEST_FLOAT32, rows=16 if pairs <= 8 * experts else 32)
    return next((tile for most, tile in _TILES if pairs <= most * experts), _LARGEST)


def route(
    logits: torch.Tensor, chosen: int, normalizes: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest of experts, int32 (tokens, chosen), ties to the lower one, and their
    shares of the softmax of logits, float32 (tokens, experts), rounded to `dtype`."""
    tokens, experts = logits.shape
    ids = torch.empty(tokens, chosen, dtype=torch.int32, device=logits.device)
    shares = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits,
            ids,
            shares,
            experts,
            chosen=chosen,
            normalizes=normalizes,
            padded=triton.next_power_of_2(experts),
            slots=triton.next_power_of_2(chosen),
            num_warps=1,
        )
    return ids, shares if dtype == torch.float32 else shares.to(dtype).float()


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
):
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
        # NaN is chosen by nothing: such a token's result is NaN by its own values.
        first = tl.min(tl.where(likely == highest, expert, padded - 1), 0)
        best = tl.where(slot == n, first, best)
        values = tl.where(slot == n, highest, values)
        likely = tl.where(expert == first, -2.0, likely)
    if normalizes:
        values = values / tl.sum(tl.where(slot < chosen, values, 0.0), 0)
    tl.store(ids + token * chosen + slot, tl.minimum(best, experts - 1), mask=slot < chosen)
    tl.store(shares + token * chosen + slot, values, mask=slot < chosen)


@dataclasses.dataclass(frozen=True, slots=True)
class TritonExperts:
    """The experts of a layer as an operator."""

    weights: DenseExperts

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """See `Operators.experts`."""
        tokens, chosen = ids.shape
        experts, hidden, inner = self.weights.down.shape
        pairs, where = tokens * chosen, x.device
        y = torch.empty_like(x)
        if not tokens:
            return y
        tile = tile_for(pairs, experts, x.dtype)
        blocks = min(pairs, experts + pairs // tile.rows)
        rows = torch.empty(blocks * tile.rows, dtype=torch.int32, device=where)
        owners = torch.empty(blocks, dtype=torch.int32, device=where)
        _align[(experts,)](
            ids,
            rows,
            owners,
            pairs,
            blocks,
            experts=experts,
            padded=triton.next_power_of_2(experts),
            size=tile.rows,
            chunk=_CHUNK,
        )
        between = torch.empty(blocks * tile.rows, inner, dtype=x.dtype, device=where)
        parts = torch.empty(pairs, hidden, dtype=x.dtype, device=where)
        options = {
            "rows": tile.rows,
            "outputs": tile.outputs,
            "inputs": tile.inputs,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        _activate[(blocks, triton.cdiv(inner, tile.outputs))](
            x.contiguous(),
            self.weights.gate_up,
            rows_of=rows,
            owners=owners,
            between=between,
            pairs=pairs,
            chosen=chosen,
            hidden=hidden,
            inner=inner,
            **options,
        )
        _lead_back[(blocks, triton.cdiv(hidden, tile.outputs))](
            between,
            self.weights.down,
            rows_of=rows,
            owners=owners,
            shares=shares.contiguous(),
            parts=parts,
            pairs=pairs,
            hidden=hidden,
            inner=inner,
            **options,
        )
        block = min(1024, triton.next_power_of_2(hidden))
        _add[(tokens, triton.cdiv(hidden, block))](
            parts, y, hidden, chosen=chosen, block=block, num_warps=4
        )
        return y


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
    """Put the pairs of one expert into blocks of their own, in order; what is left of the last
    block is `pairs`. Blocks of no expert belong to -1."""
    mine = tl.program_id(0)
    expert = tl.arange(0, padded)
    counts = tl.zeros([padded], tl.int32)
    for begin in range(0, pairs, chunk):
        at = begin + tl.arange(0, chunk)
        id_ = tl.load(ids + at, mask=at < pairs, other=-1)
        counts += tl.sum((id_[:, None] == expert[None, :]).to(tl.int32), 0)
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
        for begin in range(first + own, blocks, size):
            number = begin + tl.arange(0, size)
            tl.store(owners + number, tl.zeros([size], tl.int32) - 1, mask=number < blocks)


@triton.jit(do_not_specialize=["pairs"])
def _activate(
    x,
    gate_up,
    rows_of,
    owners,
    between,
    pairs,
    chosen: tl.constexpr,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """silu(gate x) * up x of one block of pairs."""
    block = tl.program_id(0)
    expert = tl.load(owners + block)
    if expert >= 0:
        row = block * rows + tl.arange(0, rows)
        pair = tl.load(rows_of + row)
        there = pair < pairs
        token = (pair // chosen).to(tl.int64)
        j = tl.program_id(1) * outputs + tl.arange(0, outputs)
        known = j < inner
        matrix = gate_up + expert.to(tl.int64) * (2 * inner * hidden)
        gate = tl.zeros([rows, outputs], tl.float32)
        up = tl.zeros([rows, outputs], tl.float32)
        for begin in range(0, hidden, inputs):
            i = begin + tl.arange(0, inputs)
            inside = i < hidden
            values = tl.load(
                x + token[:, None] * hidden + i[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            at = matrix + j[None, :] * hidden + i[:, None]
            masked = known[None, :] & inside[:, None]
            gate = tl.dot(values, tl.load(at, mask=masked, other=0.0), gate, input_precision="ieee")
            at += inner * hidden
            up = tl.dot(values, tl.load(at, mask=masked, other=0.0), up, input_precision="ieee")
        result = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(
            between + row.to(tl.int64)[:, None] * inner + j[None, :],
            result.to(between.dtype.element_ty),
            mask=there[:, None] & known[None, :],
        )


@triton.jit(do_not_specialize=["pairs"])
def _lead_back(
    between,
    down,
    rows_of,
    owners,
    shares,
    parts,
    pairs,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """share * down(...) of one block of pairs, each to its own place."""
    block = tl.program_id(0)
    expert = tl.load(owners + block)
    if expert >= 0:
        row = block * rows + tl.arange(0, rows)
        pair = tl.load(rows_of + row)
        there = pair < pairs
        j = tl.program_id(1) * outputs + tl.arange(0, outputs)
        known = j < hidden
        matrix = down + expert.to(tl.int64) * (hidden * inner)
        total = tl.zeros([rows, outputs], tl.float32)
        for begin in range(0, inner, inputs):
            i = begin + tl.arange(0, inputs)
            inside = i < inner
            values = tl.load(
                between + row.to(tl.int64)[:, None] * inner + i[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            loaded = tl.load(
                matrix + j[None, :] * inner + i[:, None],
                mask=known[None, :] & inside[:, None],
                other=0.0,
            )
            total = tl.dot(values, loaded, total, input_precision="ieee")
        share = tl.load(shares + pair, mask=there, other=0.0)
        tl.store(
            parts + pair.to(tl.int64)[:, None] * hidden + j[None, :],
            (total * share[:, None]).to(parts.dtype.element_ty),
            mask=there[:, None] & known[None, :],
        )


@triton.jit
def _add(parts, y, hidden, chosen: tl.constexpr, block: tl.constexpr):
    """Add what a token's experts have given, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for n in tl.static_range(chosen):
        at = (token * chosen + n) * hidden + j
        total += tl.load(parts + at, mask=j < hidden, other=0.0).to(tl.float32)
    tl.store(y + token * hidden + j, total.to(y.dtype.element_ty), mask=j < hidden)
