"""Slots that the device freezes: what is planned behind a watched token changes nothing that
lasts."""

import dataclasses

import numpy as np
import pytest
import torch

import nanoactor.models.devices as devices
from nanoactor.messages.rows import RowExpander
from nanoactor.models.families.registry import FAMILIES
from nanoactor.models.limits import FROZEN, MAX_FREEZE_IDS
from nanoactor.runner.open import open_executor
from nanoactor.runner.steps.warmup import admissions
from tests.engine.harness import rank_config
from tests.models.interpreted import InterpretedDevice
from tests.models.summing import make_summing_checkpoint
from tests.models.summing_family import SUMMING
from tests.runner.steps import DECODE, SAMPLE, introduced, step_of

# The interpreter computes in NumPy, which warns where 32-bit products wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SLOTS, BLOCKS_EACH, SIZE = 3, 4, 4
PROMPTS = [3, 4]
DEPTH = 4
# Hot, so that tokens differ.
DRAWN = admissions(np.arange(SLOTS, dtype=np.int32), temperature=4.0, seed=3).sampling


@pytest.fixture(
    scope="module", params=["cpu", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def executor(request, tmp_path_factory):
    """A rank whose first layer has a state."""
    with pytest.MonkeyPatch.context() as patch:
        yield open_rank(request.param, tmp_path_factory.mktemp("model"), patch)


def open_rank(name, directory, patch):
    # One layer of sums, one of attention.
    make_summing_checkpoint(directory, num_attention_heads=2, num_key_value_heads=1)
    patch.setitem(FAMILIES, SUMMING.architecture, SUMMING)
    if name == "interpreted":
        patch.setattr(devices, "open_device", lambda *_: InterpretedDevice())
    config = rank_config(
        directory,
        device="cuda" if name == "cuda" else "cpu",
        dtype="float32",
        num_kv_blocks=SLOTS * BLOCKS_EACH,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=64,
        block_size=SIZE,
        max_model_len=BLOCKS_EACH * SIZE,
    )
    return open_executor(config)


def admitted(*freeze_ids, slots=2):
    """The prompts of the first slots; these ids freeze slot 0."""
    watched = np.full((slots, MAX_FREEZE_IDS), -1, np.int32)
    watched[0, : len(freeze_ids)] = freeze_ids
    every = np.arange(slots, dtype=np.int32)
    return dict(
        table_slots=every,
        table_starts=0 * every,
        table_counts=0 * every + BLOCKS_EACH,
        table_blocks=np.arange(slots * BLOCKS_EACH, dtype=np.int32),
        new=introduced(slots, PROMPTS[:slots], freeze_ids=watched, sampling=DRAWN[:slots]),
    )


def prompts(*freeze_ids, slots=2):
    return step_of(
        *((slot, 0, PROMPTS[slot], SAMPLE) for slot in range(slots)),
        **admitted(*freeze_ids, slots=slots),
    )


def decoding(joining=(0, 1), steps=DEPTH):
    """Steps in which these slots decode."""
    first = step_of(*((slot, 0, 1, SAMPLE | DECODE) for slot in joining))
    return [first, *(step_of() for _ in range(steps - 1))]


def clear(executor):
    executor.reset()
    batch = executor._launcher.resident
    sums, cache = batch.states
    with torch.inference_mode():
        for tensor in (*sums.arrays, batch.tokens.ids, cache.keys, cache.values):
            tensor.zero_()


def play(executor, steps, expander):
    """Run steps, a prompt's and four that decode in flight; return each one's tokens by slot."""
    flying, slots, found = [], [], []
    for number, step in enumerate(steps, 1):
        if len(flying) > DEPTH:
            found.append(flying.pop(0).wait().token_ids.tolist())
        flying.append(executor.launch(executor.prepare(dataclasses.replace(step, step=number))))
        every = expander.expand(step.rows, step.leaves)
        slots.append(np.concatenate((every.decode_slots, every.others.slots)).tolist())
    found += [step.wait().token_ids.tolist() for step in flying]
    return [dict(zip(*pair, strict=True)) for pair in zip(slots, found, strict=True)]


def kept(executor, slot, positions):
    """What lasts of a slot: its sum, and of so many positions keys, values and ids. Nothing is
    written behind them."""
    at = slot * BLOCKS_EACH * SIZE
    end = (slot + 1) * BLOCKS_EACH * SIZE
    batch = executor._launcher.resident
    sums, cache = batch.states
    parts = [array[slot] for array in sums.arrays]
    assert int(parts[1]) == positions
    tensors = cache.keys.flatten(0, 1), cache.values.flatten(0, 1), batch.tokens.ids
    for part in tensors:
        assert not part[at + positions : end].any(), "an overrun was written"
        parts.append(part[at : at + positions])
    return [part.clone() for part in parts]


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def straight(executor, steps):
    """Tokens of slot 0 where nothing freezes it, and what both slots keep behind so many steps."""
    clear(executor)
    every = [prompts(), *(decoding(steps=steps) if steps else ())]
    tokens = play(executor, every, RowExpander(SLOTS))
    lasting = [kept(executor, slot, PROMPTS[slot] + steps) for slot in range(2)]
    return [step[0] for step in tokens], *lasting


@pytest.mark.parametrize("place", range(DEPTH))
def test_nothing_of_an_overrun_lasts(executor, place):
    """The step that chooses a watched token is one of four in flight. To the device an end and a
    gate are the same."""
    tokens, _, bystander = straight(executor, DEPTH)
    assert len({*tokens}) == len(tokens), "tokens are told apart"
    _, expected, _ = straight(executor, place)
    clear(executor)
    others = [token for token in range(MAX_FREEZE_IDS + DEPTH) if token not in tokens]
    freeze_ids = *others[: MAX_FREEZE_IDS - 1], tokens[place]
    found = play(executor, [prompts(*freeze_ids), *decoding()], RowExpander(SLOTS))
    assert [step[0] for step in found] == tokens[: place + 1] + [FROZEN] * (DEPTH - place)
    same(kept(executor, 0, PROMPTS[0] + place), expected)
    same(kept(executor, 1, PROMPTS[1] + DEPTH), bystander)


@pytest.mark.parametrize("place", range(DEPTH))
def test_a_frozen_slot_goes_on_behind_its_newest_token(executor, place):
    """As behind free text: the host sends the position that was not computed, and decodes on."""
    tokens, _, _ = straight(executor, DEPTH)
    ids = np.array([tokens[place]], np.int32)
    row = step_of((0, PROMPTS[0] + place, 1, SAMPLE), leaves=[0], token_ids=ids)
    left = DEPTH - place
    clear(executor)
    steps = [prompts(tokens[place]), *decoding(), row, *decoding([0], left)]
    found = [step[0] for step in play(executor, steps, RowExpander(SLOTS))]
    assert found[1 + DEPTH :][:left] == tokens[place + 1 :]
    end = PROMPTS[0] + place + 1 + left
    lowered = kept(executor, 0, end)
    clear(executor)
    before = decoding(steps=place) if place else ()
    row = dataclasses.replace(row, leaves=np.arange(min(place, 1), dtype=np.int32))
    play(executor, [prompts(), *before, row, *decoding([0], left)], RowExpander(SLOTS))
    same(lowered, kept(executor, 0, end))


def test_a_new_sequence_in_a_frozen_slot_decodes(executor):
    tokens, _, _ = straight(executor, DEPTH)
    clear(executor)
    second = dataclasses.replace(prompts(slots=1), leaves=np.array([0], np.int32))
    steps = [prompts(tokens[1]), *decoding(), second, *decoding([0])]
    found = [step[0] for step in play(executor, steps, RowExpander(SLOTS))]
    assert found == [*tokens[:2], *[FROZEN] * (DEPTH - 1), *tokens]
