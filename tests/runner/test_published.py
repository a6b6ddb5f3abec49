"""The ring in which decode steps leave their ids for the host."""

import dataclasses

import pytest
import torch

from nanoactor.models.devices.cpu.device import CPUDevice
from nanoactor.runner.steps.published import PublishedIds, WrongStep

ROWS = 5


class Publishing(CPUDevice):
    """Publishes as the kernel does."""

    def __init__(self):
        super().__init__()
        self.traits = dataclasses.replace(self.traits, publishes_ids=True)

    def publish(self, ids, ring, count):
        place = ring[int(count) % len(ring)]
        place[0], place[1 : 1 + len(ids)] = count, ids
        count += 1


@pytest.fixture
def published():
    return PublishedIds(Publishing(), in_flight=3, rows=ROWS)


def ids_of(step):
    return torch.full((ROWS,), step, dtype=torch.int32)


def test_steps_are_read_in_their_order_while_others_are_under_way(published):
    for first in range(0, 30, 3):
        taken = []
        for step in range(first, first + 3):
            published.publish(ids_of(step))
            taken.append(published.claim(1 + step % ROWS))
        for step, place in enumerate(taken, first):
            assert place.ids().tolist() == [step] * (1 + step % ROWS)


def test_what_was_read_is_not_written_again(published):
    published.publish(ids_of(7))
    ids = published.claim(ROWS).ids()
    for step in range(8):
        published.publish(ids_of(step))
    assert ids.tolist() == [7] * ROWS


def test_a_step_that_is_not_the_one_expected_is_an_error(published):
    for step in range(4):  # all places of the ring are written
        published.publish(ids_of(step))
        published.claim(ROWS)
    early = published.claim(ROWS)
    with pytest.raises(WrongStep, match="of decode step 0 instead of those of 4"):
        early.ids()
    for step in range(4, 9):
        published.publish(ids_of(step))
    with pytest.raises(WrongStep, match="of decode step 8 instead of those of 4"):
        early.ids()


def test_steps_that_ran_to_be_recorded_do_not_count(published):
    for _ in range(3):
        published.publish(ids_of(-1))
    published.restart()
    published.publish(ids_of(0))
    assert published.claim(ROWS).ids().tolist() == [0] * ROWS


def test_a_device_that_cannot_is_never_asked():
    published = PublishedIds(CPUDevice(), in_flight=3, rows=ROWS)
    published.publish(ids_of(0))
    assert published.claim(ROWS) is None
