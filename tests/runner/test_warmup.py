"""The steps with which an executor warms up."""

from types import SimpleNamespace

import pytest

from nanoactor.models.layers.state import SlotState
from nanoactor.runner.steps.launcher import StepLauncher
from nanoactor.runner.steps.measuring import WarmUp
from nanoactor.runner.steps.warmup import mixed_update, prefill_step
from tests.runner.test_freezing import BLOCKS_EACH, SIZE, SLOTS, open_rank

# The interpreter computes in NumPy, which warns where 32-bit products wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOKENS = 5


@pytest.fixture(scope="module", params=["cpu", "interpreted"])
def executor(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield open_rank(request.param, tmp_path_factory.mktemp("model"), patch)


def run(executor, decode_rows):
    """Return the ids of a prompt and of decode rows, and the lengths of all slots but the dummy."""
    batch, launcher = executor._make_state(SLOTS * BLOCKS_EACH)
    prefill = batch.update(prefill_step(TOKENS, 1, SIZE))
    result = launcher.launch(mixed_update(prefill, decode_rows)).wait()
    return result.token_ids.copy(), launcher.resident.tables.lengths[:SLOTS].tolist()


@pytest.mark.parametrize("decode_rows", range(SLOTS))
def test_decode_rows_do_not_change_the_prompt(executor, decode_rows):
    alone, _ = run(executor, 0)
    ids, lengths = run(executor, decode_rows)
    assert len(ids) == 1 + decode_rows
    assert ids[0] == alone[0]
    assert lengths == [TOKENS] + [0] * (SLOTS - 1)


@pytest.mark.parametrize(
    ("tokens", "max_rows", "sizes"),
    [(TOKENS, 2, [1, 2]), (TOKENS, 1, [1]), (TOKENS, 0, [0]), (1, 2, [])],
)
def test_mixed_steps_have_the_fewest_and_the_most_rows(
    executor, monkeypatch, tokens, max_rows, sizes
):
    """A single token is computed like a decode row, and makes no mixed step."""
    warm_up = WarmUp(executor._config, executor._model, executor._traits, executor._make_state)
    warm_up._batch, warm_up._launcher = executor._make_state(SLOTS * BLOCKS_EACH)
    launch, found = warm_up._launcher.launch, []

    def watch(update):
        found.append((len(update.prefill.token_ids), update.decode_rows))
        return launch(update)

    monkeypatch.setattr(warm_up._launcher, "launch", watch)
    warm_up._run_mixed(tokens, max_rows)
    assert found == [(tokens, rows) for rows in sizes]


def test_the_warm_up_runs_mixed_steps_where_kernels_are_compiled(executor, monkeypatch):
    """Otherwise the first long prompt beside decode rows would wait for a compilation."""
    found, launch = set(), StepLauncher.launch

    def watch(self, update):
        if update.prefill is not None:
            found.add(update.decode_rows)
        return launch(self, update)

    monkeypatch.setattr(StepLauncher, "launch", watch)
    config, model, traits = executor._config, executor._model, executor._traits
    WarmUp(config, model, traits, executor._make_state).run()
    assert found == ({0, 1, SLOTS - 1} if model.device.traits.asynchronous else {0})


def test_the_memory_of_states_is_not_part_of_a_steps(executor, monkeypatch):
    """It is subtracted once from what is free for the cache."""
    bytes_per_slot = 1 << 30
    device, allocate, allocated = executor._model.device, SlotState.allocate, 0

    def count(self, zeros, blocks, block_size, slots):
        nonlocal allocated
        allocated += bytes_per_slot * slots
        return allocate(self, zeros, blocks, block_size, slots)

    monkeypatch.setattr(SlotState, "allocate", count)
    monkeypatch.setattr(SlotState, "bytes_per_slot", bytes_per_slot)
    monkeypatch.setattr(device, "memory", lambda: SimpleNamespace(free=(1 << 40) - allocated))
    monkeypatch.setattr(device, "peak_memory", lambda: 0)
    config, model, traits = executor._config, executor._model, executor._traits
    _, step = WarmUp(config, model, traits, executor._make_state).run()
    assert allocated == model.cache_sizing.slots_bytes == bytes_per_slot * (SLOTS + 1)
    assert step < bytes_per_slot
