"""Whole numbers of 64 bits, sorting, what is cut before sampling, and a step's bookkeeping."""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

import torch

from nanoactor.models.batch import (
    DecodeRows,
    RowBuffers,
    SamplingBatch,
    SlotTables,
)
from nanoactor.models.sampling.columns import WORDS, column_views, pack
from nanoactor.models.sampling.philox import gumbel_noise, gumbel_noise_at, philox
from nanoactor.models.sampling.rows import SamplingGroups
from nanoactor.models.sampling.sampler import from_keys, sample, sort_keys
from tests.npu.reference.registry import KERNELS
from tests.npu.smoke_checks.frame import Check, Failed, Rig, Skipped, noise, same

VOCABULARY = 151936
_TOP = 0xFFFFFFFF
T = TypeVar("T")


def words(seed: int, count: int) -> torch.Tensor:
    """int64 numbers of 32 bits, the largest among them."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 1 << 32, (count,), generator=generator)
    found[:3] = torch.tensor([0, _TOP, 1 << 31])
    return found


def overflow(rig: Rig) -> str:
    """Products wrap around, shifts keep the sign."""
    x, y = words(1, 4096), words(2, 4096).flip(0)
    there = rig.to(x), rig.to(y)
    product = there[0] * there[1]
    same("product", product, x * y)
    same("product with a number", there[0] * 0xD2511F53, x * 0xD2511F53)
    same("shift to the right", product >> 32, (x * y) >> 32)
    same("low half", product & _TOP, (x * y) & _TOP)
    same("shift to the left", there[0] << 31, x << 31)
    same("exclusive or", there[0] ^ product, x ^ (x * y))
    return "*, >>, <<, &, ^"


def random_bits(rig: Rig) -> str:
    """Bit for bit."""
    counter = [words(n, 4096) for n in range(4)]
    key = words(5, 4096), words(6, 4096).flip(0)
    expected = philox(tuple(counter), key)
    found = philox(tuple(map(rig.to, counter)), tuple(map(rig.to, key)))
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        same(f"word {number}", one, other)
    return f"{4 * 4096} words"


def gumbel(rig: Rig) -> str:
    """Logarithms may be rounded in another way; for all ids and for chosen ones they may not."""
    seeds, positions = torch.tensor([1, -7, 1 << 62]), torch.tensor([0, 5, 40000])
    moved = rig.to(seeds), rig.to(positions)
    found, expected = gumbel_noise(*moved, VOCABULARY), gumbel_noise(seeds, positions, VOCABULARY)
    error = float((found.cpu() - expected).abs().max())
    if not error < 1e-4:
        raise Failed(f"off by {error:.1e}")
    ids = torch.arange(0, VOCABULARY, 37).repeat(3, 1)
    at = gumbel_noise_at(*moved, rig.to(ids))
    same("noise of chosen ids", at, found.cpu().gather(1, ids))
    return f"off by at most {error:.1e}"


def sorting(rig: Rig) -> str:
    """Keys bit for bit, and the best of them by int64 topk."""
    scores = noise(4, VOCABULARY, dtype=torch.bfloat16).float()
    scores[0, 10], scores[1, 11], scores[2, 12] = float("-inf"), 0.0, -0.0
    ids = torch.arange(VOCABULARY)
    expected = sort_keys(scores, ids)
    found = sort_keys(rig.to(scores), rig.to(ids))
    same("keys", found, expected)
    for count in (1, 20, 1024, VOCABULARY):
        best = found.topk(count).values
        same(f"topk {count}", best, expected.topk(count).values)
        for part, other in zip(from_keys(best), from_keys(best.cpu()), strict=True):
            same(f"what keys hold, topk {count}", part, other)
    return "topk of 1, 20, 1024 and all"


def greatest(rig: Rig) -> str:
    """Equal logits: the engine's greedy choice should be the lowest id."""
    logits = (noise(64, VOCABULARY, dtype=torch.float32) * 2).round()
    found, expected = rig.to(logits).argmax(-1).cpu(), logits.argmax(-1)
    picked = logits.gather(1, found[:, None])
    same("the greatest logit", picked[:, 0], logits.amax(-1))
    lowest = int((found == expected).sum())
    return f"the lowest id of equal logits in {lowest} of 64 rows"


def cut(
    rig: Rig, scores: torch.Tensor, p: torch.Tensor, k: torch.Tensor | None, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator's result and the reference's; those kept have their value."""
    if not rig.device.runtime.is_a2_or_a3:
        raise Skipped("the chip has no such operator: the device does not call it there")
    moved = None if k is None else rig.to(k)
    found = torch.ops.npu.npu_top_k_top_p(rig.to(scores), p=rig.to(p), k=moved).cpu()
    expected = KERNELS["npu_top_k_top_p"](scores, p, k)
    kept = found != float("-inf")
    if not torch.equal(found[kept], scores[kept]):
        raise Failed(f"{what}: some of what is kept has changed")
    return kept, expected != float("-inf")


def borderline(scores: torch.Tensor, p: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Which scores lie so near to the edge of top-p that rounding decides; `kept` by top-k."""
    masked = scores.double().masked_fill(~kept, float("-inf"))
    ordered, places = masked.sort(dim=-1, stable=True)
    summed = ordered.softmax(-1).cumsum(-1)
    near = (summed - (1 - p.double()[:, None])).abs() < 1e-4
    return torch.empty_like(near).scatter_(1, places, near)


def agree(
    what: str, found: torch.Tensor, expected: torch.Tensor, near: torch.Tensor | None = None
) -> None:
    """Raises `Failed` where other ids are kept."""
    wrong = found != expected
    if near is not None:
        wrong &= ~near
    if wrong.any():
        rows = wrong.any(-1).nonzero().flatten().tolist()
        counts = f"{found.sum(-1).tolist()} are kept, not {expected.sum(-1).tolist()}"
        raise Failed(f"{what}: other ids are kept in rows {rows}; {counts}")


def filtered(rig: Rig) -> str:
    """k from 1 to 1,024, p from 0 to 1, both and top-p alone."""
    scores = noise(6, VOCABULARY, dtype=torch.float32, scale=3.0)
    k = torch.tensor([1, 2, 20, 50, 1023, 1024], dtype=torch.int32)
    one, p = torch.ones(6), torch.tensor([0.0, 0.1, 0.5, 0.9, 0.95, 1.0])
    agree("k, p=1.0", *cut(rig, scores, one, k, "k"))
    by_k = KERNELS["npu_top_k_top_p"](scores, None, k) != float("-inf")
    agree("k and p", *cut(rig, scores, p, k, "k and p"), borderline(scores, p, by_k))
    every = torch.ones_like(by_k)
    agree("p", *cut(rig, scores, p, None, "p"), borderline(scores, p, every))
    return "k=1 to 1024, p=0.0 to 1.0"


def ties(rig: Rig) -> str:
    """All that equal the k-th stay; of those at the edge of top-p the higher ids."""
    scores = (noise(4, VOCABULARY, dtype=torch.float32) * 2).round()
    k, one = torch.tensor([1, 20, 500, 1024], dtype=torch.int32), torch.ones(4)
    agree("k", *cut(rig, scores, one, k, "k"))
    few, p = scores[:, :64].contiguous(), torch.tensor([0.2, 0.5, 0.8, 0.95])
    found, expected = cut(rig, few, p, None, "p")
    near = borderline(few, p, torch.ones_like(expected))
    if torch.equal(found, expected) or not (found != expected)[~near].any():
        return "as documented"
    if torch.equal(found.sum(-1), expected.sum(-1)):
        return "as documented for k; at the edge of p as many, but other ids"
    raise Failed(f"p: {found.sum(-1).tolist()} are kept, not {expected.sum(-1).tolist()}")


def sampling_batch(rows: int) -> SamplingBatch:
    """Rows of every kind, on the host."""
    numbers = torch.arange(rows)
    kinds = [numbers[numbers % 5 == kind] for kind in range(5)]
    words = [
        pack(
            dict(
                temperature=0.0 if row % 5 == 0 else 0.8,
                top_k={2: 20, 3: 5000}.get(row % 5, 0),
                top_p=0.9 if row % 5 >= 2 else 1.0,
                min_p=0.02 if row % 10 == 4 else 0.0,
                seed=row * 1234567891011,
            )
        )
        for row in range(rows)
    ]
    table = torch.frombuffer(bytearray(b"".join(words)), dtype=torch.int32).view(rows, WORDS).T
    columns = column_views(table.contiguous(), torch.float32)
    groups = SamplingGroups(*kinds, masked_rows=numbers[:2], masked_ids=torch.tensor([3, 4]))
    return SamplingBatch(columns, numbers + 17, groups)


def moved(rig: Rig, value: T) -> T:
    """A dataclass of tensors, or of such dataclasses, on the device."""
    fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
    there = [rig.to(f) if isinstance(f, torch.Tensor) else moved(rig, f) for f in fields]
    return type(value)(*there)


def sampling(rig: Rig) -> str:
    """All kinds of rows, against the same on the host: a rounding may decide a few."""
    rows = 40 if rig.quick else 200
    logits = noise(rows, 4096, dtype=torch.float32, scale=3.0)
    batch = sampling_batch(rows)
    found = rig.device.sample(rig.to(logits), moved(rig, batch)).cpu()
    expected = sample(logits.clone(), batch)
    wrong = (found != expected).nonzero().flatten().tolist()
    if len(wrong) > rows // 50:
        raise Failed(f"{len(wrong)} of {rows} rows differ, such as {wrong[:5]}")
    return f"{rows - len(wrong)} of {rows} rows are the same"


def bookkeeping(rig: Rig) -> str:
    """`advance`: positions, places and lengths of the next step's rows, two of them at positions of
    their own, the dummy's twice; then of the same, of which one slot is frozen."""
    slots, width, dummy = 5, 4, 4
    blocks = torch.arange(slots * width, dtype=torch.int32).view(slots, width).flip(1)
    lengths = torch.tensor([0, 127, 128, 300, 0], dtype=torch.int32)
    last = torch.arange(100, 100 + slots, dtype=torch.int32)
    deltas = torch.tensor([0, -3, 0, -100, 0], dtype=torch.int32)
    words = torch.zeros(WORDS, slots, dtype=torch.int32)
    frozen, freeze_ids = torch.zeros(slots, dtype=torch.int32), torch.full((8, slots), -1).int()
    columns = (blocks, lengths, last, deltas, words, frozen, freeze_ids)
    *moved, frozen, freeze_ids = map(rig.to, columns)
    tables = SlotTables(*moved, 128, frozen, freeze_ids)
    rows = torch.tensor([3, 1, 2, 0, 0, dummy, dummy], dtype=torch.int32)
    own = torch.tensor([-1, -1, -1, 7, 8, -1, -1], dtype=torch.int32)
    own_ids = torch.tensor([0, 0, 0, 11, 12, 0, 0], dtype=torch.int32)
    size = torch.zeros(len(rows), dtype=torch.int32)
    into = RowBuffers(rig.to(size), rig.to(size.clone()), rig.to(size.long()), rig.to(size.clone()))
    ids = rig.to(torch.full((slots * width * 128,), -1, dtype=torch.int32))
    with rig.device.stream():
        asked = DecodeRows(*map(rig.to, (rows, own, own_ids)))
        rig.device.advance(tables, asked, into, ids)
        rig.device.synchronize()
    at = [300, 127, 128, 7, 8, 0, 0]
    tokens = torch.where(own < 0, last[rows], own_ids)
    places = [
        int(blocks[row, position // 128]) * 128 + position % 128
        for row, position in zip(rows.tolist(), at, strict=True)
    ]
    same("ids at their places", ids.cpu()[places], tokens)
    same("positions", into.positions, torch.tensor(at, dtype=torch.int32) + deltas[rows])
    same("token ids", into.token_ids, tokens)
    same("contexts", into.contexts, torch.tensor(at, dtype=torch.int32) + 1)
    found = into.slot_mapping.cpu()
    same("places", found[:5], torch.tensor(places[:5]))
    if found[5] == found[6] or not {int(n) // 128 for n in found[5:]} == {int(blocks[dummy, 0])}:
        raise Failed(f"the dummy's rows are at {found[5:].tolist()}")
    expected = torch.tensor([0, 128, 129, 301, 0], dtype=torch.int32)
    same("lengths", tables.lengths, expected)
    with rig.device.stream():
        freeze_ids[5, 1] = int(last[1])
        rig.device.advance(tables, asked, into, ids)
        rig.device.synchronize()
    found = into.slot_mapping.cpu()
    if len({*found[[1, 5, 6]].tolist()}) < 3 or int(found[1]) // 128 != int(blocks[dummy, 0]):
        raise Failed(f"the row of a frozen slot is at {int(found[1])}")
    same("frozen slots", tables.frozen, torch.tensor([0, 1, 0, 0, 0], dtype=torch.int32))
    expected = torch.tensor([0, 128, 130, 302, 0], dtype=torch.int32)
    same("lengths of slots that are not frozen", tables.lengths, expected)
    return ""


def checks() -> list[Check]:
    """In their order."""
    functions = {
        "int64: overflow and shifts": overflow,
        "int64: Philox": random_bits,
        "Gumbel noise": gumbel,
        "int64: sort keys and topk": sorting,
        "argmax": greatest,
        "npu_top_k_top_p": filtered,
        "npu_top_k_top_p: ties": ties,
        "sampling": sampling,
        "the batch's bookkeeping": bookkeeping,
    }
    return [Check(name, functools.partial(_run, f)) for name, f in functions.items()]


def _run(function, rig: Rig) -> str:
    with torch.inference_mode():
        return function(rig)
