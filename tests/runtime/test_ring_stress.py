"""Nothing is lost, torn or reordered, and nobody hangs, whatever readers do."""

import pytest

from tests.runtime.ring_stress import CAPACITY, DOOM, run

EVERY_OFFSET = CAPACITY // 64


def check(result, records):
    assert result["writer"]["sent"] == records
    assert result["writer"]["offsets"] == EVERY_OFFSET
    for reader in result["readers"]:
        assert reader == {"seen": records, "wrong": []}


@pytest.mark.timeout(120)
def test_records_of_every_size_at_every_offset_reach_every_reader():
    check(run(60_000, ["fast", "slow"]), 60_000)


@pytest.mark.timeout(120)
def test_a_killed_reader_costs_the_others_nothing_and_does_not_hang_the_writer():
    result = run(10_000_000, ["doomed", "moody"])
    assert result["writer"]["stuck"], "the writer went on without its dead reader"
    sent = result["writer"]["sent"]
    assert sent >= DOOM
    assert result["readers"][0] is None
    assert result["readers"][1] == {"seen": sent, "wrong": []}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_million_records():
    check(run(1_000_000, ["fast", "slow", "moody"]), 1_000_000)
