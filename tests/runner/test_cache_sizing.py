"""How many blocks there is memory for, without a model that would take it."""

from types import SimpleNamespace

import pytest

from nanoactor.models.errors import NotEnoughMemory
from nanoactor.runner.model.cache_sizing import CacheSizing

MIB = 1 << 20


def sizing(*, blocks=None, slot=0, ranks=1, shared=False, agreed=100):
    """Of a device with 100 MiB free, on which a block of 16 tokens takes 1 MiB; a sequence has up
    to 10 blocks."""
    engine = SimpleNamespace(num_kv_blocks=blocks, memory_utilization=None, max_num_seqs=4)
    files = SimpleNamespace(max_model_len=160, is_length_auto=False)
    each = SimpleNamespace(bytes_per_token=MIB // 16 - 4, bytes_per_slot=slot)
    return CacheSizing(
        SimpleNamespace(engine=engine, files=files),
        SimpleNamespace(default_memory_utilization=0.5, shared_memory=shared),
        SimpleNamespace(size=ranks, all_reduce_min=lambda own: min(own, agreed)),
        [each],
        block_size=16,
        free_bytes=100 * MIB,
    )


@pytest.mark.parametrize(
    ("used", "peak", "options", "blocks"),
    [
        (15, 5, {}, 30),
        (1, 1, {}, 40),  # no more than all sequences can use
        (15, 5, dict(slot=2 * MIB), 20),  # of four sequences and the dummy
        (15, 5, dict(agreed=17), 17),  # another rank has room for fewer
        (15, 5, dict(ranks=2), 30),
        (16, 5, dict(ranks=2, shared=True), 12),
        (15, 5, dict(blocks=80), 80),  # what is asked for may take all that is free
    ],
)
def test_blocks_take_what_weights_and_steps_leave(used, peak, options, blocks):
    assert sizing(**options).num_blocks(used * MIB, peak * MIB) == blocks


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, r"50% of 100 MiB free - 30 MiB of weights - 15 MiB for a step = 5 MiB in blocks of 1"),
        (dict(slot=2 * MIB), r"10 MiB of states.*lower max_num_seqs, give the cache"),
        (dict(blocks=56), r"num_kv_blocks 56 is too large: .* leave 55 MiB, enough for only 55"),
        (dict(blocks=50, slot=2 * MIB), r"10 MiB of states \(2.00 MiB for each of 4 .* leave 45"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(options, told):
    with pytest.raises(NotEnoughMemory, match=told):
        sizing(**options).num_blocks(30 * MIB, 15 * MIB)
