"""Chunks that an executor computes as decode rows: the tokens are those of chunks."""

import dataclasses

import numpy as np
import pytest

import nanoactor.models.devices as devices
from nanoactor.grammar.messages import DeferredSamples
from nanoactor.messages import Step
from nanoactor.models.devices.cuda import CUDADevice
from nanoactor.models.devices.portable import PortableOperators
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


def steps_with_runs():
    """Slots 0 and 1 decode, 4 and 5 are constrained: 4 has a run of three tokens, beside a single
    one of 5; then the other way round; then both choose."""
    first, *_ = steps()
    constrained = dataclasses.replace(first.admissions, constrained=int32(4, 5))
    first = dataclasses.replace(first, admissions=constrained)
    second = step_of(2, [(4, 7, 3, False), (5, 8, 1, False)], joins=(0, 1))
    third = step_of(3, [(5, 9, 3, False), (4, 10, 1, False)])
    both = DeferredSamples(int32(4, 5), np.array([4, 5]), int32(11, 12))
    fourth = dataclasses.replace(step_of(4, [(2, 5, 1, True)]), deferred=(both,))
    return first, second, third, fourth


def run(executor, made):
    """The tokens of each step, and how many of its rows were decode rows, of an empty engine."""
    executor.renew()
    tokens, rows = [], []
    for step in made():
        choosing = sum(len(deferred.slots) for deferred in step.deferred)
        masks = np.full((choosing, 7), -1, np.int32) if choosing else NO_MASKS
        update = executor.prepare(step, NO_PIXELS, masks)
        rows.append(update.decode_rows)
        tokens.append(executor.launch(update).wait().token_ids.tolist())
    return tokens, rows


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("interpreted", marks=pytest.mark.long),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_rows_give_the_tokens_of_chunks_in_their_order(device, tmp_path, monkeypatch):
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    make_checkpoint(tmp_path, **CONFIGURATIONS["untied"], **heads)
    monkeypatch.setattr(PortableOperators, "runs_as_rows_from", 1)
    monkeypatch.setattr(CUDADevice, "runs_as_rows_from", 1)
    if device == "interpreted":
        monkeypatch.setattr(devices, "open_device", lambda *_: InterpretedDevice())
    config = rank_config(
        tmp_path,
        device="cuda" if device == "cuda" else "cpu",
        dtype="float32",
        num_kv_blocks=SLOTS * BLOCKS_EACH,
        enforce_eager=device != "cuda",
        **LIMITS,
    )
    executor = open_executor(config)
    found, rows = run(executor, steps)
    assert [len(ids) for ids in found] == [2, 4, 6, 5]
    in_runs, rows_of_runs = run(executor, steps_with_runs)
    assert [len(ids) for ids in in_runs] == [2, 2, 2, 5]
    assert (rows, rows_of_runs) == ([0, 6, 5, 5], [0, 6, 6, 3])
    as_chunks = Continued(NO_ROWS, NO_ROWS, int32(), 0, NO_ROWS)
    monkeypatch.setattr(ContinuedSlots, "split", lambda _, step, __: (step, as_chunks))
    assert run(executor, steps) == (found, [0, 2, 4, 4])
    assert run(executor, steps_with_runs) == (in_runs, [0, 2, 2, 2])
    assert len({token for ids in found + in_runs for token in ids}) > 8, "rows are told apart"
