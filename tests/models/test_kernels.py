"""The kernels that lay out, store and sample, against what they replace; the attention kernels at
sizes that `test_device.py` does not reach. Memory that must be written is poisoned first."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from nanoactor.models.batch import (
    DecodeRows,
    FusedSamplingInputs,
    HeadTransform,
    KVCache,
    RowBuffers,
    SamplingBatch,
    SlotTables,
)
from nanoactor.models.devices import open_device
from nanoactor.models.devices.portable import PortableOperators
from nanoactor.models.limits import CANDIDATES, FROZEN, MAX_FREEZE_IDS, NO_TOKEN, NOTHING_ALLOWED
from nanoactor.models.sampling.rows import SamplingGroups
from nanoactor.models.sampling.sampler import sample
from tests.models.batches import attention_batch, words_of
from tests.models.interpreted import InterpretedDevice

# What is poisoned on purpose makes NumPy, in which the interpreter computes, warn.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.drawn(2)]
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
SIZE = 4
SLOTS = 9


@pytest.fixture(params=["cpu", "interpreted", GPU])
def device(request):
    device = InterpretedDevice() if request.param == "interpreted" else open_device(request.param)
    device.prepare_thread(1)
    return device


def int32(device, values):
    return torch.tensor(values, dtype=torch.int32, device=device.torch_device)


def poisoned(device, *shape, dtype=torch.int32):
    return torch.full(shape, -99, dtype=dtype, device=device.torch_device)


def make_tables(device, rows=None, freezing=()):
    """Tables whose slots sample as `rows` say, greedily if they do not; the last tokens of those of
    `freezing` freeze them."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randperm(SLOTS * 6, generator=generator).int().view(SLOTS, 6)
    lengths = torch.arange(SLOTS).int() * 2
    last = torch.arange(SLOTS).int() + 100
    deltas = -torch.arange(SLOTS).int().flip(0) % 4
    words = words_of(rows or [dict(temperature=0.0)] * SLOTS)
    frozen, freeze_ids = torch.zeros(SLOTS).int(), torch.full((MAX_FREEZE_IDS, SLOTS), -1).int()
    for number, slot in enumerate(freezing):
        freeze_ids[number % MAX_FREEZE_IDS, slot] = last[slot]
    columns = (blocks, lengths, last, deltas, words, frozen, freeze_ids)
    *state, frozen, freeze_ids = (x.to(device.torch_device) for x in columns)
    return SlotTables(*state, SIZE, frozen, freeze_ids)


def by_slot(temperature, top_k=(0,) * SLOTS, top_p=(1.0,) * SLOTS, min_p=(0.0,) * SLOTS):
    """Sampling parameters of all slots, with seeds at the edges of 64 bits."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    values = zip(temperature, top_k, top_p, min_p, SEEDS, strict=True)
    return [dict(zip(names, row, strict=True)) for row in values]


# -- where tokens stand ------------------------------------------------------------------------


OWN = {(3, 9): 51, (1, 0): 52, (1, 1): 53, (1, 2): 54}
"""Tokens of rows (slot, position) that have a position of their own."""


@pytest.mark.parametrize("own", [{}, OWN], ids=["follow", "own"])
@pytest.mark.parametrize("rows", [[], [4], [0, 2, 5, 7, 8, 8, 8], [8] * 300], ids=len)
def test_advance_lays_out_a_token_for_each_row(device, rows, own):
    tables, dummy = make_tables(device), SLOTS - 1
    before = [x.cpu().clone() for x in (tables.blocks, tables.lengths, tables.last_tokens)]
    asked = [*((slot, None) for slot in rows), *own]
    count = len(asked) + 2
    into = RowBuffers(
        *(poisoned(device, count) for _ in range(2)),
        poisoned(device, count, dtype=torch.int64),
        poisoned(device, count),
    )
    ids = poisoned(device, tables.blocks.numel() * SIZE)
    columns = [slot for slot, _ in asked], [-1] * len(rows) + [at for _, at in own]
    tokens = [-5] * len(rows) + [*own.values()]
    device.advance(tables, DecodeRows(*(int32(device, x) for x in (*columns, tokens))), into, ids)
    noted = {}
    blocks, lengths, last = before
    for at, (slot, position) in enumerate(asked):
        token = int(last[slot]) if position is None else own[slot, position]
        position = int(lengths[slot]) if position is None else position
        place = int(blocks[slot, position // SIZE]) * SIZE + position % SIZE
        found = [int(x[at]) for x in (into.token_ids, into.positions, into.slot_mapping)]
        assert found == [token, position + int(tables.rope_deltas[slot]), place]
        assert int(into.contexts[at]) == position + 1
        noted[place] = token
    for column in (into.token_ids, into.positions, into.slot_mapping, into.contexts):
        assert (column[len(asked) :] == -99).all()
    assert {at: token for at, token in enumerate(ids.tolist()) if token != -99} == noted
    expected = lengths + torch.tensor([slot in rows and slot != dummy for slot in range(SLOTS)])
    assert torch.equal(tables.lengths.cpu(), expected.int())


def advance(device, tables, rows, own=()):
    """Advance rows of these slots, and others at positions of their own; return what is laid out,
    and the ids at their places."""
    count = len(rows) + len(own)
    into = RowBuffers.zeros(device.zeros, count, count)
    ids = poisoned(device, tables.blocks.numel() * SIZE)
    slots, positions, tokens = zip(*((slot, -1, -5) for slot in rows), *own, strict=True)
    asked = DecodeRows(*(int32(device, column) for column in (slots, positions, tokens)))
    device.advance(tables, asked, into, ids)
    return into, ids


def test_a_slot_whose_last_token_is_watched_is_frozen_until_it_is_told_a_position(device):
    freezing = range(2, 7)
    tables, dummy = make_tables(device, freezing=freezing), SLOTS - 1
    lengths, last = tables.lengths.clone(), tables.last_tokens.clone()
    for _ in range(3):  # a frozen slot stays so, whatever is chosen for it
        into, ids = advance(device, tables, [1, *freezing, 7], [(0, 9, 77)])
        assert tables.frozen.tolist() == [int(slot in freezing) for slot in range(SLOTS)]
        places = [int(tables.blocks[dummy, 0]) * SIZE] * len(freezing)
        assert into.slot_mapping[1:6].tolist() == places
        written = {at for at, token in enumerate(ids.tolist()) if token != -99}
        assert written == {*places, *into.slot_mapping[[0, 6, 7]].tolist()}
        assert into.token_ids.min() >= 0
        assert into.positions[1:6].tolist() == (lengths + tables.rope_deltas)[2:7].tolist()
        tables.last_tokens.copy_(last + 50)
    grown = [lengths[slot] + 3 * (slot in (1, 7)) for slot in range(SLOTS)]
    assert tables.lengths.tolist() == grown
    tables.frozen[3] = 0  # as the host writes with another length
    into, _ = advance(device, tables, [3, 4])
    assert tables.frozen.tolist() == [0, 0, 1, 0, 1, 1, 1, 0, 0]
    assert tables.lengths[3] == lengths[3] + 1
    assert tables.lengths[4] == lengths[4]


@pytest.mark.parametrize("tokens", [0, 1, 700])
def test_locate_finds_each_tokens_place(device, tokens):
    tables = make_tables(device)
    generator = torch.Generator().manual_seed(2)
    slots = torch.randint(SLOTS, (tokens,), generator=generator).int()
    positions = torch.randint(6 * SIZE, (tokens,), generator=generator).int()
    mapping = poisoned(device, tokens + 1, dtype=torch.int64)
    where = device.torch_device
    device.fill_slot_mapping(tables, slots.to(where), positions.to(where), mapping)
    blocks = tables.blocks.cpu().long()[slots.long(), positions.long() // SIZE]
    assert mapping.tolist() == [*(blocks * SIZE + positions % SIZE).tolist(), -99]


@pytest.mark.parametrize("rows", [1, 40])
def test_ids_are_published_with_the_number_of_their_step(device, rows):
    """The count goes on where it overflows."""
    if not device.traits.publishes_ids:
        pytest.skip(f"{device.traits.name} publishes none")
    ring = device.empty_pinned(4, 1 + 50, dtype=torch.int32).fill_(-99)
    count = int32(device, [2**31 - 2])
    for step in range(3):
        device.publish(int32(device, range(10 * step, 10 * step + rows)), ring, count)
    device.synchronize()
    assert ring[:, 0].tolist() == [-(2**31), -99, 2**31 - 2, 2**31 - 1]
    for place, step in ((2, 0), (3, 1), (0, 2)):
        assert ring[place, 1 : 1 + rows].tolist() == list(range(10 * step, 10 * step + rows))
        assert (ring[place, 1 + rows :] == -99).all()
    assert (ring[1] == -99).all()
    assert count.tolist() == [1 - 2**31]


# -- queries, keys and values ------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 7, 22, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 24), (3, 3, 8), (16, 8, 128)])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("rotated", [None, 4])
def test_heads_are_normed_rotated_and_stored_as_one_operator_after_the_other(
    device, tokens, heads, kv_heads, dim, normed, rotated
):
    generator = torch.Generator().manual_seed(tokens)

    def make(*shape):
        return torch.randn(shape, generator=generator).to(device.torch_device)

    blocks = tokens // SIZE + 2
    qkv, weights = make(tokens, heads + 2 * kv_heads, dim), (make(dim), make(dim))
    weights = weights if normed else None
    if tokens > 5:
        qkv[3, -1, 2], qkv[4, -kv_heads - 1, 1] = math.nan, math.inf
    angles = make(tokens, (rotated or dim) // 2)
    rotation = device.rotation(angles.cos(), angles.sin())
    order = torch.randperm(blocks * SIZE, generator=generator)[:tokens]
    slots = order.to(device.torch_device)
    caches = []
    for operators in (device, PortableOperators()):
        shape = (blocks, SIZE, kv_heads, dim)
        cache = KVCache(*(torch.full(shape, 5.0, device=device.torch_device) for _ in range(2)))
        q = operators.norm_rotate_store(
            qkv.clone(), HeadTransform(weights, 1e-5, rotation), cache, slots
        )
        caches.append((q, cache.keys, cache.values))
    for found, expected in zip(*caches, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert all(part.isfinite().all() for part in caches[0][1:])


# -- sampling ----------------------------------------------------------------------------------


def sampled_by_hand(logits, tables, slots):
    """By the reference, on the same device."""
    at = slots.to(logits.device).long()
    columns = tables.sampling
    greedy = columns.temperature[at] == 0
    limited = ~greedy & (columns.top_k[at] > 0)
    none = torch.empty(0, dtype=torch.int64, device=logits.device)
    cut = (columns.top_p[at] < 1) | (columns.min_p[at] > 0)
    large = columns.top_k[at] > CANDIDATES
    kinds = (
        greedy,
        ~greedy & ~limited & ~cut,
        ~greedy & limited & ~large,
        ~greedy & large,
        ~greedy & ~limited & cut,
    )
    groups = (rows.nonzero()[:, 0] for rows in kinds)
    batch = SamplingBatch.of(tables, at, SamplingGroups(*groups, none, none))
    return sample(logits.clone(), batch)


SEEDS = [0, 1, 2**63, 2**64 - 1, 5, 6, 7, 8, 9]
ROWS = torch.tensor([5, 0, 1, 2, 4, 3, 7, 6, 1, 8, 8])


def check_sampling(device, tables, logits, slots=ROWS):
    """Chosen ids are the reference's, each slot remembers one of its rows', and nothing else is
    written."""
    scratch = device.scratch(len(slots), 4, 2, 24, logits.shape[1])
    chosen = poisoned(device, len(slots) + 1)
    device.sample_rows(
        FusedSamplingInputs(logits, slots.int().to(device.torch_device), tables, scratch, chosen)
    )
    assert chosen[:-1].tolist() == sampled_by_hand(logits, tables, slots).tolist()
    assert int(chosen[-1]) == -99
    last = tables.last_tokens.cpu()
    assert all(int(last[slot]) in chosen[:-1][slots == slot].tolist() for slot in slots)


@pytest.mark.parametrize("rows", [None, by_slot([1.0] * SLOTS, [0, 5, 0] * 3, [1.0, 1.0, 0.5] * 3)])
def test_frozen_slots_bring_no_token(device, rows):
    tables = make_tables(device, rows)
    logits = torch.randn(SLOTS, 211, generator=torch.Generator().manual_seed(3))
    slots, scratch = int32(device, range(SLOTS)), device.scratch(SLOTS, 4, 2, 24, 211)
    free, chosen = poisoned(device, SLOTS), poisoned(device, SLOTS)
    there = logits.to(device.torch_device)
    device.sample_rows(FusedSamplingInputs(there, slots, tables, scratch, free))
    tables.frozen[1:5] = 1
    device.sample_rows(FusedSamplingInputs(there, slots, tables, scratch, chosen))
    expected = free.clone()
    expected[1:5] = FROZEN
    assert chosen.tolist() == expected.tolist()
    assert tables.last_tokens.min() >= 0


@pytest.mark.parametrize("vocabulary", [3, 211, 4096, 9001])
def test_sampled_tokens_are_those_of_the_reference(device, vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    temperature = [0.0, 0.6, 1.0, 0.0, 1e-30, 3.0, 0.8, 50.0, 0.0]
    logits = torch.randn(len(ROWS), vocabulary, generator=generator) * 4
    logits[2], logits[0, 1:] = 7.0, -math.inf  # ties, and hardly a choice
    tables = make_tables(device, by_slot(temperature))
    check_sampling(device, tables, logits.to(device.torch_device))


TRUNCATED = [
    (v, k) for v in (3, 211, 1500, 9001) for k in ("random", "ties", "flat", "peaked", "few")
]
QUICK = [(211, "ties")]


def make_logits(kind, vocabulary, generator):
    logits = torch.randn(len(ROWS), vocabulary, generator=generator) * 3
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.full_like(logits, -2.5)
    elif kind == "peaked":  # the best lie in one group
        logits[:, 100:400] += 50
    elif kind == "few":
        logits[:, 5:] = -math.inf
    return logits


@pytest.mark.parametrize(
    ("vocabulary", "kind"),
    [pytest.param(*c, marks=() if c in QUICK else pytest.mark.long) for c in TRUNCATED],
)
def test_truncated_tokens_are_those_of_the_reference(device, vocabulary, kind):
    """With ties at the bound, within one group and over all: more than are sorted at once."""
    logits = make_logits(kind, vocabulary, torch.Generator().manual_seed(vocabulary))
    top_k = [0, 1, 2, 20, 256, 50, 255, 7, 20]
    top_p = [1.0, 1.0, 0.5, 0.93, 1.0, 0.89, 1e-9, 1.0, 0.3]
    min_p = [0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.0, 0.5, 1.0]
    temperature = [0.7, 0.6, 1.0, 0.6, 1.5, 3.0, 0.8, 50.0, 0.0]
    tables = make_tables(device, by_slot(temperature, top_k, top_p, min_p))
    check_sampling(device, tables, logits.to(device.torch_device))


@pytest.mark.parametrize(
    ("vocabulary", "kind"),
    [
        pytest.param(v, k, marks=() if (v, k) == (9001, "ties") else pytest.mark.long)
        for v in (3, 211, 9001)
        for k in ("random", "ties", "flat", "peaked", "few")
    ],
)
def test_what_top_p_and_min_p_alone_leave_is_not_sorted(device, vocabulary, kind):
    """Down to a few of thousands of ids: most draws from all are out, and the next is taken."""
    logits = make_logits(kind, vocabulary, torch.Generator().manual_seed(vocabulary))
    top_p = [0.999, 0.5, 1.0, 0.03, 1.0, 0.89, 0.2, 1e-9, 0.3]
    min_p = [0.0, 0.0, 0.9, 0.05, 0.01, 0.0, 0.0, 0.5, 1.0]
    temperature = [0.7, 0.6, 30.0, 9.0, 1.5, 30.0, 50.0, 1.0, 0.0]
    tables = make_tables(device, by_slot(temperature, [0] * 9, top_p, min_p))
    check_sampling(device, tables, logits.to(device.torch_device))


@pytest.mark.parametrize("kind", ["random", "ties", "flat", "peaked", "few"])
@pytest.mark.parametrize("vocabulary", [3, 211, 9001])
def test_a_cpu_samples_from_what_top_p_and_large_top_ks_leave(vocabulary, kind):
    pytest.importorskip("numba")
    device = open_device("cpu")
    assert device.traits.fused_sampling == "all"
    generator = torch.Generator().manual_seed(vocabulary)
    logits = make_logits(kind, vocabulary, generator)
    top_k = [0, 0, 300, 1000, 0, 0, 8999, 0, 0]
    top_p = [0.999, 0.5, 1.0, 0.93, 1.0, 0.89, 0.2, 1e-9, 0.3]
    min_p = [0.0, 0.0, 0.0, 0.05, 0.01, 0.0, 0.0, 0.5, 1.0]
    temperature = [0.7, 0.6, 1.0, 0.6, 1.5, 30.0, 0.8, 1.0, 0.0]
    tables = make_tables(device, by_slot(temperature, top_k, top_p, min_p))
    check_sampling(device, tables, logits)


def test_without_rows_nothing_is_sampled(device):
    scratch = device.scratch(4, 4, 2, 24, 100)
    tables = make_tables(device)
    logits = torch.empty(0, 100, device=device.torch_device)
    device.sample_rows(
        FusedSamplingInputs(logits, int32(device, []), tables, scratch, poisoned(device, 1))
    )


@pytest.mark.parametrize(
    ("vocabulary", "top_k"),
    [
        *((211, 0), (211, 20), (4097, 0)),
        *(pytest.param(151_936, top_k, marks=pytest.mark.gpu) for top_k in (0, 20)),
    ],
)
def test_rows_whose_logits_are_not_finite_get_no_token_and_harm_no_other(device, vocabulary, top_k):
    if vocabulary > 100_000 and device.traits.name == "interpreted":
        pytest.skip("where there is a GPU, Triton's interpreter is off")
    tables = make_tables(device, by_slot([0.0, 1.0] * 4 + [0.0], [top_k] * SLOTS))
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(SLOTS, vocabulary, generator=generator)
    logits[:2], logits[2:4], logits[4:6] = math.nan, -math.inf, math.inf
    logits[6, -1] = math.nan  # one of many
    logits[7, 3:] = -math.inf  # nothing wrong
    logits = logits.to(device.torch_device)
    scratch = device.scratch(SLOTS, 4, 2, 24, vocabulary)
    chosen = poisoned(device, SLOTS)
    device.sample_rows(
        FusedSamplingInputs(logits, int32(device, range(SLOTS)), tables, scratch, chosen)
    )
    assert chosen[:7].tolist() == [NO_TOKEN] * 7
    assert chosen[7:].tolist() == sampled_by_hand(logits, tables, torch.arange(SLOTS))[7:].tolist()
    last = tables.last_tokens.cpu()[:SLOTS]
    assert ((last >= 0) & (last < vocabulary)).all(), "the next step looks them up"


def mask_words(allowed):
    """int32 (rows, words): a bit for each id that may be chosen."""
    rows, ids = allowed.shape
    padded = torch.zeros(rows, -(-ids // 32) * 32, dtype=torch.int64)
    padded[:, :ids] = allowed
    bits = padded.view(rows, -1, 32) << torch.arange(32)
    return bits.sum(-1).to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize("device", ["interpreted", GPU], indirect=True)
@pytest.mark.parametrize("vocabulary", [3, 211, 4096, 9001])
def test_kept_logits_are_sampled_under_masks(device, vocabulary):
    """Rows in any order, each from the logits of its slot; what a mask leaves out may be anything,
    and who is left nothing is told apart from who has computed nothing."""
    generator = torch.Generator().manual_seed(vocabulary)
    tables = make_tables(device, by_slot([0.0, 0.6, 1.0, 0.0, 1.0, 3.0, 0.8, 50.0, 0.0]))
    kept = torch.randn(SLOTS, vocabulary, generator=generator) * 4
    slots = torch.tensor([5, 0, 8, 2, 4, 3, 7, 6, 1])
    allowed = torch.rand(len(slots), vocabulary, generator=generator) < 0.3
    allowed[:, -1] = True
    allowed[5] = False  # slot 3: nothing is left
    allowed[6] = False
    kept[7] = math.nan  # nothing is left of what is broken
    kept[6, -1] = math.nan  # one that is allowed
    kept[1, 0], allowed[8, 0] = math.nan, False  # one that is not
    kept = kept.to(device.torch_device)
    masks = mask_words(allowed).to(device.torch_device)
    scratch = device.scratch(len(slots), 4, 2, 24, vocabulary)
    chosen = poisoned(device, len(slots) + 1)
    there = slots.int().to(device.torch_device)
    device.sample_masked_rows(FusedSamplingInputs(kept, there, tables, scratch, chosen[:-1]), masks)
    masked = kept[slots].masked_fill(~allowed.to(device.torch_device), -math.inf)
    expected = sampled_by_hand(masked, tables, slots).tolist()
    expected[5:8] = [NOTHING_ALLOWED, NO_TOKEN, NO_TOKEN]
    assert chosen.tolist() == [*expected, -99]
    for row in (0, 1, 2, 3, 4, 8):
        assert allowed[row, expected[row]]
        assert int(tables.last_tokens[slots[row]]) == expected[row]


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [0, 20, 256])
def test_a_large_vocabulary_in_bfloat16(top_k):
    device = open_device("cuda")
    device.prepare_thread(1)
    top_p = [0.95 if top_k else 1.0] * SLOTS
    tables = make_tables(device, by_slot([0.6] * 8 + [0.0], [top_k] * SLOTS, top_p))
    logits = torch.randn(256, 151_936, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(256, device="cuda").int() % SLOTS
    chosen = poisoned(device, 256)
    scratch = device.scratch(256, 16, 8, 128, 151_936)
    device.sample_rows(FusedSamplingInputs(logits, slots, tables, scratch, chosen))
    expected = sampled_by_hand(logits, tables, slots)
    assert (chosen == expected).float().mean() > 0.98  # the rest are ties within a rounding


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """In a process of its own, where Triton is not the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.models.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# -- attention at full size --------------------------------------------------------------------


def attention_reference(queries, keys, values, scale):
    """The last len(queries) positions attend to all up to themselves, float64."""
    tokens, context = len(queries), len(keys)
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("thd,chd->htc", queries.double(), keys) * scale
    own = torch.arange(context - tokens, context, device=keys.device)[:, None]
    unseen = torch.arange(context, device=keys.device)[None] > own
    return torch.einsum("htc,chd->thd", scores.masked_fill(unseen, -math.inf).softmax(-1), values)


class Ragged:
    """Prompt chunks, then decode rows, over shuffled blocks; what lies behind a context is huge."""

    def __init__(self, device, dtype, heads, kv_heads, dim, block, prefills, decodes):
        self.device, self.scale = device, 2.0 * dim**-0.5
        where, generator = device.torch_device, torch.Generator().manual_seed(heads + block)
        self.contexts = [context for context, _ in prefills] + decodes
        self.counts = [tokens for _, tokens in prefills] + [1] * len(decodes)
        self.blocks = [-(-context // block) for context in self.contexts]
        order = torch.randperm(sum(self.blocks), generator=generator).int()
        self.tables = torch.zeros(len(self.contexts), max(self.blocks), dtype=torch.int32)
        for row, part in enumerate(order.split(self.blocks)):
            self.tables[row, : len(part)] = part
        shape = (sum(self.blocks), block, kv_heads, dim)
        stored = torch.full((2, *shape), 1e4)
        for row, part in enumerate(order.split(self.blocks)):
            flat = torch.full((2, len(part) * block, kv_heads, dim), 1e4)
            drawn = torch.randn(2, self.contexts[row], kv_heads, dim, generator=generator)
            flat[:, : self.contexts[row]] = drawn
            stored[:, part.long()] = flat.view(2, -1, *shape[1:])
        self.cache = KVCache(*(part.to(where, dtype).contiguous() for part in stored))
        drawn = torch.randn(sum(self.counts), heads, dim, generator=generator)
        self.queries = drawn.to(where, dtype)
        self.firsts = np.cumsum([0, *self.counts]).tolist()
        tables = [t[:n].tolist() for t, n in zip(self.tables, self.blocks, strict=True)]
        prompts = [(tokens, context) for context, tokens in prefills]
        shape = (heads, kv_heads, dim)
        self.batch = attention_batch(device, tables, prompts, decodes, shape, block)

    def errors(self):
        """The relative error of each row."""
        found = self.device.attention(self.queries, self.cache, self.batch, self.scale)
        for row, context in enumerate(self.contexts):
            part = self.tables[row, : self.blocks[row]].to(found.device).long()
            pair = (self.cache.keys, self.cache.values)
            keys, values = (x[part].flatten(0, 1)[:context] for x in pair)
            at = slice(self.firsts[row], self.firsts[row + 1])
            expected = attention_reference(self.queries[at], keys, values, self.scale)
            yield float((found[at].double() - expected).norm() / expected.norm())


def test_contexts_in_chunks(device):
    """One, two and four chunks to a row; prompts with a prefix of some tiles."""
    prefills = [(150, 90), (70, 1), (129, 65)]
    case = Ragged(device, torch.float32, 4, 2, 24, 16, prefills, [1, 64, 65, 200, 130])
    if device.traits.name != "cpu":
        assert len({int(first) for first in case.batch.plan.first_items}) == 5
    assert max(case.errors()) < 2e-6


@pytest.mark.parametrize(
    ("tiles", "places", "length"),
    [
        ([17, 21, 19, 18] * 16, 66, 11),  # 128 chunks in two waves; 7 would be the shortest
        ([21] * 64, 33, 21),  # whole contexts in two waves
        ([21] * 96, 33, 7),  # three waves of whole contexts: the shortest
        ([21] * 115, 33, 7),  # just below three and a half waves
        ([21] * 128, 33, 21),  # more: not split
        ([15, 27] * 64, 33, 7),  # lengths differ
        ([21] * 8, 66, 2),  # few rows: all places have chunks
        ([1, 62] * 32, 66, 11),  # two waves would need chunks of 62: too long
        ([5] * 128, 66, 5),
        ([250] + [5] * 63, 66, 5),
        ([250] + [6] * 127, 33, 11),  # one long context: chunks of 3 would be too many
        ([250] + [1] * 7, 66, 2),
        ([1], 66, 1),
    ],
)
def test_the_length_of_chunks(device, tiles, places, length):
    """Two waves if contexts are alike, and otherwise as short as there is memory for."""
    if device.traits.name == "cpu":
        pytest.skip("the CPU does not split contexts")
    from nanoactor.models.devices.cuda.kernels.decode_attention import Splits, plan_splits

    contexts = int32(device, [64 * count - row % 64 for row, count in enumerate(tiles)])
    rows, extra = len(tiles), max(132, 3 * len(tiles))
    room = poisoned(device, rows + extra)
    sums = torch.empty(rows + extra, 4, 16), torch.empty(rows + extra, 4)
    firsts, plan, arrivals = room[:rows].clone(), poisoned(device, 2), poisoned(device, rows)
    splits = Splits(room, room.clone(), firsts, plan, *sums, arrivals, places)
    plan_splits(contexts, splits)
    counts = [-(-count // length) for count in tiles]
    assert splits.plan.tolist() == [64 * length, sum(counts)]
    assert splits.rows[: sum(counts)].tolist() == [
        row for row, count in enumerate(counts) for _ in range(count)
    ]
    assert splits.chunk_indices[: sum(counts)].tolist() == [
        index for count in counts for index in range(count)
    ]
    assert splits.first_items.tolist() == [sum(counts[:row]) for row in range(rows)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 3, 20), (16, 8, 128)])
def test_decode_attention_on_a_cpu(dtype, heads, kv_heads, dim, threads):
    """Blocks that are fetched ahead and larger ones; rows of one thread, heads of two."""
    device = open_device("cpu")
    device.prepare_thread(threads)
    for decodes in ([1500], [1, 15, 16, 17, 300, 64]):
        case = Ragged(device, dtype, heads, kv_heads, dim, 16, [], decodes)
        allowed = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        assert max(case.errors()) < allowed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("heads", [16, 32, 40], ids=lambda heads: f"{heads}_heads")
def test_attention_over_long_and_ragged_contexts(dtype, block, heads):
    device = open_device("cuda")
    device.prepare_thread(1)
    prefills = [(700, 700), (3000, 17), (1, 1), (2049, 513), (64, 64), (65, 1)]
    decodes = [1, 63, 64, 65, 5000, 1000, 129, *range(200, 1500, 13)]
    case = Ragged(device, dtype, heads, 8, 128, block, prefills, decodes)
    allowed = 2e-6 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    assert max(case.errors()) < allowed
