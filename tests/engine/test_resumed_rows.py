"""Chunks that an executor computes as decode rows: the tokens are those of chunks."""

import dataclasses

import numpy as np
import pytest

import nanoactor.models.devices as devices
from nanoactor.messages.rows import RowExpander, Want
from nanoactor.runner.batch import row_layout
from nanoactor.runner.batch.batch import NO_MASKS
from nanoactor.runner.batch.pixels import NO_PIXELS
from nanoactor.runner.open import open_executor
from tests.engine.harness import rank_config
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint
from tests.models.interpreted import InterpretedDevice
from tests.runner.steps import DECODE, KEEP, SAMPLE, introduced, permuted, rows_of, step_of

# The interpreter computes in NumPy, which warns where 32-bit products wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SLOTS, BLOCKS_EACH = 6, 4
LIMITS = dict(max_num_seqs=SLOTS, max_num_batched_tokens=64, block_size=4, max_model_len=16)


def made(number, *rows, **others):
    """A step of such rows, whose tokens depend on its number."""
    ids = int(rows_of(*rows).ids.sum())
    token_ids = np.random.default_rng(number).integers(0, 211, ids).astype(np.int32)
    return step_of(*rows, number=number, token_ids=token_ids, **others)


def first_step(*, kept=()):
    """The prompts of all slots; those of `kept` keep their states."""
    slots = np.arange(SLOTS, dtype=np.int32)
    rows = [(0, 0, 3, SAMPLE), (1, 0, 4, SAMPLE)]
    rows += [(slot, 0, 3 + slot, KEEP if slot in kept else Want(0)) for slot in range(2, SLOTS)]
    return made(
        1,
        *rows,
        table_slots=slots,
        table_starts=0 * slots,
        table_counts=0 * slots + BLOCKS_EACH,
        table_blocks=np.arange(SLOTS * BLOCKS_EACH, dtype=np.int32),
        new=introduced(SLOTS, [3, 4, 3, 3, 3, 3]),
    )


def joining(*slots):
    return [(slot, 0, 1, SAMPLE | DECODE) for slot in slots]


def steps():
    """Slots 0 and 1 decode, 2 and 3 resume, 4 lacks some tokens, 5 is constrained. In the last
    step nobody is."""
    resumed = [(2, 5, 1, SAMPLE), (3, 6, 1, SAMPLE), (4, 7, 1, Want(0)), (5, 8, 1, KEEP)]
    second = made(2, *resumed, *joining(0, 1))
    third = made(3, (4, 8, 1, SAMPLE), *joining(2, 3), (5, 9, 0, SAMPLE))
    return first_step(kept=[5]), second, third, made(4, (4, 9, 1, SAMPLE))


def steps_with_runs():
    """Slots 0 and 1 decode, 4 and 5 are constrained: 4 has a run of three tokens, next to a single
    one of 5; then the other way round; then both choose."""
    second = made(2, (4, 7, 3, KEEP), (5, 8, 1, KEEP), *joining(0, 1))
    third = made(3, (5, 9, 3, KEEP), (4, 10, 1, KEEP))
    fourth = made(4, (2, 5, 1, SAMPLE), (4, 11, 0, SAMPLE), (5, 12, 0, SAMPLE))
    return first_step(kept=[4, 5]), second, third, fourth


def run(executor, steps):
    """By step: the tokens by slot; and how many rows were decode rows, of an empty engine."""
    executor.reset()
    expander, tokens, rows = RowExpander(SLOTS), [], []
    for step in steps:
        choices = int(step.rows.choices.sum())
        masks = np.full((choices, 7), -1, np.int32) if choices else NO_MASKS
        update = executor.prepare(step, NO_PIXELS, masks)
        rows.append(update.decode_rows)
        computed = executor.launch(update).wait()
        every = expander.expand(step.rows, step.leaves)
        slots = np.concatenate((every.decode_slots, every.others.slots))
        counts = computed.counts if len(computed.counts) else np.ones(len(slots), np.int32)
        assert len(counts) == len(slots)
        pairs = zip(np.repeat(slots, counts).tolist(), computed.token_ids.tolist(), strict=True)
        tokens.append(sorted(pairs))
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
    original = devices.open_device

    def open_device(*arguments):
        found = InterpretedDevice() if device == "interpreted" else original(*arguments)
        found.traits = dataclasses.replace(found.traits, min_rows_for_runs=1)
        return found

    monkeypatch.setattr(devices, "open_device", open_device)
    config = rank_config(
        tmp_path,
        device="cuda" if device == "cuda" else "cpu",
        dtype="float32",
        num_kv_blocks=SLOTS * BLOCKS_EACH,
        enforce_eager=device != "cuda",
        **LIMITS,
    )
    executor = open_executor(config)
    found, rows = run(executor, steps())
    assert [len(ids) for ids in found] == [2, 4, 6, 5]
    in_runs, rows_of_runs = run(executor, steps_with_runs())
    assert [len(ids) for ids in in_runs] == [2, 2, 2, 5]
    assert (rows, rows_of_runs) == ([0, 6, 5, 5], [0, 6, 6, 3])
    for seed in range(3):  # in whatever order the rows are sent
        rng = np.random.default_rng(seed)
        for every, right in ((steps(), found), (steps_with_runs(), in_runs)):
            shuffled = [permuted(step, rng.permutation(len(step.rows)).tolist()) for step in every]
            assert run(executor, shuffled)[0] == right
    monkeypatch.setattr(row_layout, "_singles", lambda rows, *_: np.zeros(len(rows), np.bool_))
    assert run(executor, steps()) == (found, [0, 2, 4, 4])
    assert run(executor, steps_with_runs()) == (in_runs, [0, 2, 2, 2])
    assert len({token for ids in found + in_runs for _, token in ids}) > 8, "rows are told apart"


def test_positions_computed_too_far_are_computed_again(tmp_path):
    """Three tokens are planned ahead of a result of which the first alone counts: a row that the
    host sends overwrites what was computed behind it."""
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    make_checkpoint(tmp_path, **CONFIGURATIONS["untied"], **heads)
    limits = dict(LIMITS, num_kv_blocks=SLOTS * BLOCKS_EACH, dtype="float32")
    executor = open_executor(rank_config(tmp_path, device="cpu", **limits))
    other = 17

    def ahead(number):
        return [
            step_of(*([(0, 3, 1, SAMPLE | DECODE)] * (n == number)), number=n)
            for n in range(number, number + 3)
        ]

    one, far = first_step(), ahead(2)
    (_, *computed), _ = run(executor, [one, *far])
    # Not the second but another token follows the first; it is the host's, and then it decodes.
    ids = np.array([other], np.int32)
    row = step_of((0, 4, 1, SAMPLE), number=5, leaves=[0], token_ids=ids)
    again = [step_of((0, 5, 1, SAMPLE | DECODE), number=6), step_of(number=7)]
    lowered, _ = run(executor, [one, *far, row, *again])
    straight, _ = run(executor, [one, far[0], dataclasses.replace(row, step=3), *again])
    assert lowered[1:4] == computed
    assert lowered[4:] == straight[2:]
    assert len({token for ids in lowered[4:] for _, token in ids}) > 1
