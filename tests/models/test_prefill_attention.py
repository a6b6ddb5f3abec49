"""Attention of prompts: the kernel whose keys and values come by TMA, and the one it replaces.

Against float64; all of the cache that no prompt may read is NaN, and so is the output before.
On a CPU both run in Triton's interpreter, with boxes of a few keys.
"""

import dataclasses
import functools
import gc
import logging
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.devices import open_device
from nanoactor.models.devices.cuda.kernels import prefill, prefill_attention_tma
from nanoactor.models.devices.cuda.kernels.prefill import (
    NARROW,
    WIDE,
    PrefillAttention,
    unsupported_reason,
)
from nanoactor.models.devices.cuda.kernels.prefill_attention import tokens_per_program
from nanoactor.models.devices.cuda.kernels.prefill_attention_tma import SplitBuffers, Variant
from nanoactor.models.seq_lens import NO_SEQ_LENS
from tests.models.interpreted import InterpretedDevice, by_tma
from tests.models.test_device import HEADS, RAGGED, Case, Maker, assert_close

# What is poisoned on purpose makes NumPy, in which the interpreter computes, warn.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KINDS = ("before", "wide", "narrow", "divided")
GUARDED = 3
"""Tokens behind the prompts', whose output stays as it was."""


def kernel(kind, tile):
    """One kernel in the interpreter, whatever the number of programs."""
    if kind == "before":
        return PrefillAttention((8, 0), 0)
    rows, multiprocessors = {"wide": (128, 0), "narrow": (32, 0), "divided": (32, 64)}[kind]
    return by_tma((dataclasses.replace(WIDE, rows=rows, tile=tile),) * 2, multiprocessors)


@pytest.fixture(autouse=True)
def divided_early(request, monkeypatch):
    """Contexts of a few tiles are divided too, but on the card."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(prefill_attention_tma, "_MIN_TILES", 1)


class Prompts:
    """Rows of (new tokens, context at the end) over shuffled blocks, in slots of any order."""

    def __init__(self, where, dtype, rows, shape=(4, 2, 64), block=64, unused_programs=0, seed=0):
        self.rows, self.block, (heads, kv_heads, dim) = rows, block, shape
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-context // block) for _, context in rows]
        order = torch.randperm(sum(needed) + 2, generator=generator).int()
        slots = torch.randperm(len(rows) + 1, generator=generator)[: len(rows)].int()
        tables = torch.full((len(rows) + 1, max(needed) + 1), int(order[-1]), dtype=torch.int32)
        cache = torch.full((2, len(order), block, kv_heads, dim), math.nan, dtype=dtype)
        self.context = []
        for (_, context), slot, part in zip(rows, slots, order.split([*needed, 2]), strict=False):
            tables[slot, : len(part)] = part
            drawn = torch.randn(2, context, kv_heads, dim, generator=generator).to(dtype)
            flat = torch.full((2, len(part) * block, kv_heads, dim), math.nan, dtype=dtype)
            flat[:, :context] = drawn
            cache[:, part.long()] = flat.unflatten(1, (-1, block))
            self.context.append(drawn.to(where))
        self.cache = KVCache(cache[0].to(where), cache[1].to(where))
        self.firsts = np.cumsum([0, *(count for count, _ in rows)]).tolist()
        drawn = torch.randn(self.firsts[-1] + GUARDED, heads, dim, generator=generator)
        self.queries, self.scale = drawn.to(where, dtype), 2.0 * dim**-0.5
        each = tokens_per_program(heads, kv_heads)
        tiles = [(r, t) for r, (count, _) in enumerate(rows) for t in range(-(-count // each))]
        tiles += [(-1, 0)] * unused_programs
        lines = [(slots[r], self.firsts[r], *rows[r]) for r in range(len(rows))]
        none = torch.empty(0, dtype=torch.int32, device=where)

        def columns(values):
            return torch.tensor(values, dtype=torch.int32).T.contiguous().to(where)

        self.batch = AttentionBatch(
            none.long(),
            tables.to(where),
            block,
            prefill_tokens=self.firsts[-1],
            prefill_rows=columns(lines),
            prefill_tiles=columns(tiles),
            decode_slots=none,
            decode_contexts=none,
            lengths=NO_SEQ_LENS,
        )

    def run(self, attention):
        output = torch.full_like(self.queries, math.nan)
        attention(self.queries, self.cache, self.batch, self.scale, output)
        return output

    def check(self, output, allowed):
        """Every token is written and no other; some of each row, the first and the last among
        them, are right."""
        total = self.firsts[-1]
        assert output[:total].isfinite().all()
        assert output[total:].isnan().all()
        for row, (count, context) in enumerate(self.rows):
            keys, values = self.context[row].double()
            picks = {0, count // 3, count // 2, count - 1, *range(0, count, max(1, count // 16))}
            for token in picks:
                at = self.firsts[row] + token
                expected = self.expected(at, keys, values, context - count + token + 1)
                found = output[at].double()
                assert float((found - expected).norm() / expected.norm()) < allowed, (row, token)

    def expected(self, at, keys, values, seen):
        query = self.queries[at].double().unflatten(0, (keys.shape[1], -1))
        scores = torch.einsum("kgd,nkd->kgn", query, keys[:seen]) * self.scale
        return torch.einsum("kgn,nkd->kgd", scores.softmax(-1), values[:seen]).flatten(0, 1)


# -- in the interpreter ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [pytest.param(*h, marks=() if h in HEADS[1:3] else pytest.mark.long) for h in HEADS],
)
@pytest.mark.parametrize("name", [name for name, rows in RAGGED.items() if "prefills" in rows])
def test_ragged_prompts_over_scattered_blocks(kind, heads, kv_heads, name):
    """Prompts, chunks behind cached prefixes, decode rows behind them."""
    device = InterpretedDevice()
    device.prefill_attention = kernel(kind, Case.size)
    case = Case(Maker(device, torch.float32), heads, kv_heads, **RAGGED[name], dim=16)
    assert_close(case.run(device), case.expected(), torch.float32, roundings=4)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_hundreds(kind):
    device = InterpretedDevice()
    device.prefill_attention = kernel(kind, Case.size)
    case = Case(Maker(device, torch.float32), 4, 2, prefills=[(13, 13), (21, 6)], dim=16)
    case.queries *= 64
    assert_close(case.run(device), case.expected(), torch.float32, roundings=200)


@settings(max_examples=12)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=4),
    heads=st.sampled_from(HEADS),
    pages=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    unused_programs=st.integers(0, 3),
    seed=st.integers(0, 1 << 20),
)
def test_any_mix_is_attended_to(rows, heads, pages, kind, unused_programs, seed):
    rows = [(count, cached + count) for count, cached in rows]
    shape, where = (*heads, 16), torch.device("cpu")
    case = Prompts(where, torch.float32, rows, shape, 8 * pages, unused_programs, seed)
    case.check(case.run(kernel(kind, 8)), allowed=4e-6)


def test_float16_is_rounded_once():
    case = Prompts(torch.device("cpu"), torch.float16, [(70, 90)], block=16)
    for kind in KINDS:
        case.check(case.run(kernel(kind, 16)), allowed=2e-3)


def test_contexts_are_divided_so_that_no_last_wave_is_nearly_empty():
    """132 multiprocessors that hold two programs each."""
    parts = SplitBuffers(
        torch.empty(0), torch.empty(0), torch.zeros(SplitBuffers.max_programs(132))
    )
    assert [parts.split_count(n) for n in (1, 8, 16, 64, 128, 132)] == [5, 5, 5, 4, 2, 2]
    assert parts.split_count(144) == 3, "two waves of parts of a third, instead of two of halves"
    assert [parts.split_count(n) for n in (256, 264, 1320, 5000)] == [1, 1, 1, 1]


def test_all_that_divide_a_context_count_and_nothing_else_does():
    """Six tiles of 8 keys in parts of two; the counters are ready for the next step."""
    where = torch.device("cpu")
    attention = kernel("divided", 8)
    variant = dataclasses.replace(WIDE, rows=32)
    attention._split_buffers[16] = parts = SplitBuffers.empty(40, variant, 16, where)
    for seed in range(2):
        case = Prompts(where, torch.float32, [(3, 48)], (4, 2, 16), 8, seed=seed)
        parts.sums.fill_(math.nan), parts.totals.fill_(math.nan)
        case.check(case.run(attention), allowed=4e-6)
        written = parts.totals[:, 0, 0].isfinite().view(-1, 4)
        assert written[:2].tolist() == [[True, True, True, False]] * 2
        assert not written[2:].any()
        assert not parts.finished.any()


# -- which kernel ------------------------------------------------------------------------------


def test_what_is_attended_to_by_tma():
    hopper = functools.partial(unsupported_reason, (9, 0))
    for dtype in (torch.bfloat16, torch.float16):
        for size in (64, 128):
            for block in (64, 128, 256):
                assert hopper(dtype, block, size) is None
    assert "block_size 16 " in hopper(torch.bfloat16, 16, 128)
    assert "block_size 96 " in hopper(torch.bfloat16, 96, 128)
    assert "head_dim 80 " in hopper(torch.bfloat16, 64, 80)
    assert "head_dim 256 " in hopper(torch.bfloat16, 64, 256)
    assert "float32 " in hopper(torch.float32, 64, 128)
    for older in ((7, 5), (8, 0), (8, 9)):
        assert "not 9.0 (Hopper)" in unsupported_reason(older, torch.bfloat16, 64, 128)
    assert "12.0 " in unsupported_reason((12, 0), torch.bfloat16, 64, 128), "never measured there"


@pytest.mark.parametrize(
    ("capability", "dtype", "block", "told"),
    [
        ((9, 0), torch.bfloat16, 64, False),
        ((9, 0), torch.bfloat16, 16, True),
        ((9, 0), torch.float32, 16, False),
        ((8, 0), torch.bfloat16, 16, False),
        ((10, 0), torch.bfloat16, 64, True),
    ],
)
def test_a_slower_kernel_is_told_with_its_cost(caplog, capability, dtype, block, told):
    """But not on an older GPU, for which there is no other."""
    device = InterpretedDevice()
    device.prefill_attention = PrefillAttention(capability, 132)
    with caplog.at_level(logging.WARNING, "nanoactor.models.cuda"):
        device.check(dtype, block, 128)
    assert ("47 %" in caplog.text) == told
    assert len(caplog.records) == told


@pytest.mark.parametrize(("heads", "last"), [(16, 1024), (32, 512), (8, 2048)])
def test_few_programs_are_narrow(heads, last):
    """As long as wide ones would leave a multiprocessor with one or none."""
    attention = PrefillAttention((9, 0), 132)
    for tokens in (1, 16, last - 1, last):
        assert attention.variant(tokens, heads, 8) == NARROW
    for tokens in (last + 64, 2 * last, 65_536):
        assert attention.variant(tokens, heads, 8) == WIDE


def test_the_first_prompt_compiles_both_variants_and_later_ones_none(monkeypatch):
    called = []
    monkeypatch.setattr(prefill, "prefill_attention_tma", lambda *args: called.append(args[5]))
    wide, narrow = Variant(128, 16, 8, 2, 128), Variant(64, 16, 4, 3, None)
    attention = by_tma((wide, narrow), multiprocessors=3)
    many = Prompts(torch.device("cpu"), torch.float16, [(200, 200)], block=16)
    few = Prompts(torch.device("cpu"), torch.float16, [(40, 40)], block=16)
    for case in (many, many, few):
        case.run(attention)
    assert called == [wide, narrow, wide, wide, narrow]


@pytest.mark.long  # it compiles for a quarter of a minute
def test_wide_programs_fit_twice_into_a_multiprocessor(tmp_path):
    """Compiled for compute capability 9.0 by the Triton that is here: the cap holds, and hardly
    anything is spilled."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.models.compile_kernels", "prompts"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 4


# -- on the card -------------------------------------------------------------------------------

LATE = 50_000_000
"""Cycles, some 30 ms: much longer than what is launched takes to begin."""
MIX = [(700, 700), (17, 3000), (1, 1), (513, 2049), (64, 64), (1, 65), (130, 130), (63, 64)]


@pytest.fixture(scope="module")
def gpu():
    device = open_device("cuda")
    device.prepare_thread(1)
    return device


@pytest.fixture
def hopper(gpu):
    if gpu.prefill_attention.capability[0] != prefill.HOPPER:
        pytest.skip("TMA kernels are for Hopper GPUs")
    return gpu


def only(variant):
    return PrefillAttention((9, 0), 132, (variant, variant))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    ("dtype", "shape", "block"),
    [
        (torch.bfloat16, (16, 8, 128), 64),
        (torch.bfloat16, (16, 8, 128), 256),
        (torch.bfloat16, (32, 8, 128), 64),
        (torch.bfloat16, (40, 8, 128), 64),
        (torch.bfloat16, (12, 12, 64), 128),
        (torch.float16, (16, 8, 128), 64),
        (torch.float16, (14, 2, 64), 64),
    ],
    ids=str,
)
def test_ragged_prompts_on_the_card(hopper, variant, dtype, shape, block):
    case = Prompts(hopper.torch_device, dtype, MIX, shape, block, unused_programs=5)
    assert only(variant).unsupported_reason(dtype, block, shape[-1]) is None
    case.check(case.run(only(variant)), allowed=2 * torch.finfo(dtype).eps)


LONG = [(40, 30_000), (300, 9_000), (1, 20_000), (64, 64), (90, 1_100)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 8, 128), (32, 8, 128), (14, 2, 64)], ids=str)
def test_contexts_that_programs_divide(hopper, shape):
    """Twenty times in a row, since the last program to be done is another each time."""
    attention = PrefillAttention((9, 0), 132)
    case = Prompts(hopper.torch_device, torch.bfloat16, LONG, shape, unused_programs=9)
    first = case.run(attention)
    case.check(first, allowed=2 * torch.finfo(torch.bfloat16).eps)
    parts = attention._split_buffers[shape[-1]]
    for _ in range(20):
        parts.sums.fill_(math.nan), parts.totals.fill_(math.nan)
        assert torch.equal(case.run(attention).nan_to_num(), first.nan_to_num())
    assert not parts.finished.any()


@pytest.mark.gpu
def test_ragged_prompts_by_the_kernel_of_older_cards(gpu):
    case = Prompts(gpu.torch_device, torch.bfloat16, MIX, (16, 8, 128), unused_programs=5)
    case.check(case.run(PrefillAttention((8, 0), 0)), allowed=2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [WIDE, NARROW], ids=["wide", "narrow"])
def test_a_captured_launch_keeps_its_descriptors(hopper, variant):
    """It is replayed with other prompts, long after what was made on the host is gone.

    All of it is in the order of one stream, and each time the inputs are late: a launch that did
    not wait for them would compute from what was there before.
    """
    case = Prompts(hopper.torch_device, torch.bfloat16, MIX, (16, 8, 128), unused_programs=5)
    batch, cache = case.batch, case.cache
    inputs = [case.queries, cache.keys, cache.values, batch.tables, batch.prefill_rows]
    inputs.append(batch.prefill_tiles)
    # Nor may a launch with another cache matter; the first of a process waits for all streams.
    other = Prompts(hopper.torch_device, torch.bfloat16, [(64, 64)], (16, 8, 128), seed=1)
    other.run(only(variant))
    torch.cuda.synchronize()  # all of that was on another stream
    attention, graph = only(variant), torch.cuda.CUDAGraph()
    with hopper.stream():
        wanted = [tensor.clone() for tensor in inputs]
        output = torch.full_like(case.queries, math.nan)
        torch.cuda._sleep(LATE)
        for tensor in inputs[:-1]:
            tensor.zero_()
        inputs[-1][0] = -1
        attention(case.queries, cache, batch, case.scale, output)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            attention(case.queries, cache, batch, case.scale, output)
    del attention
    gc.collect()
    other.run(only(variant))
    torch.cuda.synchronize()
    with hopper.stream():
        graph.replay()
        torch.cuda.synchronize()
        assert output.isnan().all(), "no program had a row"
        torch.cuda._sleep(LATE)
        for tensor, values in zip(inputs, wanted, strict=True):
            tensor.copy_(values)
        graph.replay()
    torch.cuda.synchronize()
    case.check(output, allowed=2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [WIDE, NARROW], ids=["wide", "narrow"])
def test_what_is_stored_behind_a_context_changes_no_bit(hopper, variant):
    case = Prompts(hopper.torch_device, torch.bfloat16, MIX, (16, 8, 128))
    expected = case.run(only(variant))
    for numbers in (case.cache.keys, case.cache.values):
        numbers[numbers.isnan()] = -1000.0
    total = case.firsts[-1]
    assert torch.equal(case.run(only(variant))[:total], expected[:total])
