"""Chunks that an executor computes as decode rows: the tokens are those of chunks."""

import dataclasses

import numpy as np
import pytest

import nanoactor.models.devices as devices
from nanoactor.grammar.messages import DeferredSamples
from nanoactor.messages import Step
from nanoactor.runner.batch import NO_MASKS
from nanoactor.runner.continued_rows import Continued, ContinuedSlots
from nanoactor.runner.open import open_executor
from nanoactor.runner.pixels import NO_PIXELS
from nanoactor.runner.ruled_rows import NO_ROWS
from nanoactor.runner.warmup import admissions
from tests.engine.harness import rank_config
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint
from tests.models.interpreted import InterpretedDevice

# The interpreter computes in NumPy, which warns where 32-bit products wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SLOTS, BLOCKS_EACH = 6, 4
LIMITS = dict(max_num_seqs=SLOTS, max_num_batched_tokens=64, block_size=4, max_model_len=16)


def int32(*values):
    return np.array(values, np.int32)


def step_of(number, chunks, joins=(), **others):
    """A step of chunks (slot, start, tokens, whether it samples)."""
    slots, starts, counts, samples = zip(*chunks, strict=True)
    rng = np.random.default_rng(number)
    none = int32()
    new = dict(table_slots=none, table_starts=none, table_counts=none, table_blocks=none)
    new["admissions"] = admissions(none)
    return Step(
        number,
        slots=int32(*slots),
        starts=int32(*starts),
        counts=int32(*counts),
        samples=np.array(samples, np.bool_),
        token_ids=rng.integers(0, 211, sum(counts)).astype(np.int32),
        joins=int32(*joins),
        leaves=none,
        **new | others,
    )


def steps():
    """Slots 0 and 1 decode, 2 and 3 resume, 4 lacks some tokens, 5 is constrained. In the last
    step nobody is."""
    slots = np.arange(SLOTS, dtype=np.int32)
    every = dataclasses.replace(
        admissions(slots), prompt_lengths=int32(3, 4, 3, 3, 3, 3), constrained=int32(5)
    )
    first = step_of(
        1,
        [(0, 0, 3, True), (1, 0, 4, True), *((n, 0, 3 + n, False) for n in range(2, SLOTS))],
        table_slots=slots,
        table_starts=0 * slots,
        table_counts=0 * slots + BLOCKS_EACH,
        table_blocks=np.arange(SLOTS * BLOCKS_EACH, dtype=np.int32),
        admissions=every,
    )
    resumed = [(2, 5, 1, True), (3, 6, 1, True), (4, 7, 1, False), (5, 8, 1, False)]
    second = step_of(2, resumed, joins=(0, 1))
    third = step_of(
        3,
        [(4, 8, 1, True)],
        joins=(2, 3),
        deferred=(DeferredSamples(int32(5), np.array([5]), int32(9)),),
    )
    return first, second, third, step_of(4, [(4, 9, 1, True)])


def tokens_of(executor):
    """The tokens of each step."""
    found = []
    for step in steps():
        masks = np.full((1, 7), -1, np.int32) if step.deferred else NO_MASKS
        found.append(executor.launch(executor.prepare(step, NO_PIXELS, masks)).wait().token_ids)
    return [ids.tolist() for ids in found]


@pytest.mark.parametrize("device", ["cpu", "interpreted"])
def test_rows_give_the_tokens_of_chunks_in_their_order(device, tmp_path, monkeypatch):
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    make_checkpoint(tmp_path, **CONFIGURATIONS["untied"], **heads)
    if device == "interpreted":
        monkeypatch.setattr(devices, "open_device", lambda *_: InterpretedDevice())
    config = rank_config(
        tmp_path,
        device="cpu",
        dtype="float32",
        num_kv_blocks=SLOTS * BLOCKS_EACH,
        enforce_eager=True,
        **LIMITS,
    )
    executor = open_executor(config)
    found = tokens_of(executor)
    assert [len(ids) for ids in found] == [2, 4, 6, 5]
    executor.renew()
    as_chunks = Continued(NO_ROWS, NO_ROWS, int32(), 0, NO_ROWS)
    monkeypatch.setattr(ContinuedSlots, "split", lambda _, step: (step, as_chunks))
    assert tokens_of(executor) == found
    assert len({token for ids in found for token in ids}) > 6, "rows are told apart"
