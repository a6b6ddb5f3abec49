"""Whoever kills is found, at a known price, and nobody else is."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoactor.suspects import NEXT_TO_NOTHING, WELL_PAST, Suspects


class World:
    """Requests that get tokens in a random order; some kill at a certain token, whenever they get
    there. Their readers are a few tokens behind."""

    def __init__(self, length, poison, seed):
        """By request: how many tokens it wants, and with which it kills."""
        self.length, self.poison, self.dice = dict(length), poison, random.Random(seed)
        self.told = dict.fromkeys(self.length, 0)
        self.suspects, self.convicted, self.deaths, self.trials = Suspects(), [], 0, 0

    def living(self):
        return {one: told for one, told in self.told.items() if told < self.length[one]}

    def run(self):
        while self.living():
            chosen = self.suspects.admit(self.living())
            self.trials += chosen is not None
            self.until_death_or_cleared(chosen)

    def until_death_or_cleared(self, chosen):
        computed = {one: at for one, at in self.living().items() if chosen is None or one in chosen}
        running = set(computed)
        while running:
            one = self.dice.choice(sorted(running))
            whole = self.dice.random() < 0.5  # a step with all rows, or with one
            running_now = sorted(running) if whole else [one]
            for row in running_now:
                computed[row] += 1
                if self.poison.get(row) == computed[row]:
                    self.die(computed)
                    return
                lag = self.dice.randrange(NEXT_TO_NOTHING)
                self.told[row] = max(self.told[row], computed[row] - lag)
                if computed[row] >= self.length[row]:
                    self.told[row] = self.length[row]
                    running.discard(row)
            if chosen is not None and self.suspects.is_cleared(self.living()):
                return

    def die(self, computed):
        self.deaths += 1
        assert self.deaths < 1000
        guilty = self.suspects.note_death(self.living())
        if guilty is not None:
            self.convicted.append(guilty)
            self.told[guilty] = self.length[guilty]


@given(
    count=st.integers(1, 80),
    poisons=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_who_kills_is_convicted_and_nobody_else(count, poisons, seed):
    dice = random.Random(seed)
    # Longer than a trial: who is cleared may kill further on, while others are on trial.
    length = {one: dice.randint(1, 5 * WELL_PAST) for one in range(count)}
    guilty = dice.sample(range(count), min(poisons, count))
    poison = {one: dice.randint(1, length[one]) for one in guilty}
    world = World(length, poison, seed)
    world.run()
    assert sorted(world.convicted) == sorted(guilty)
    # Two deaths until there are suspects, one for each halving, one alone; of several, each may
    # also kill after it was cleared, while others are on trial.
    assert world.deaths <= len(guilty) * (2 + len(guilty) + math.ceil(math.log2(count)))


@pytest.mark.parametrize(("count", "most"), [(1, 3), (2, 4), (64, 9)])
def test_what_one_among_many_costs(count, most):
    for guilty in (0, count // 2, count - 1):
        world = World(dict.fromkeys(range(count), 100), {guilty: 50}, guilty)
        world.run()
        assert world.convicted == [guilty]
        assert world.deaths <= most


def test_deaths_apart_make_nobody_a_suspect():
    suspects = Suspects()
    assert suspects.note_death({1: 5, 2: 0}) is None
    assert suspects.admit({1: 5, 2: 0}) is None
    assert suspects.note_death({1: 5 + NEXT_TO_NOTHING, 3: 0}) is None
    assert suspects.admit({1: 20, 3: 0}) is None


def test_a_group_that_is_cleared_makes_room_for_the_next():
    suspects = Suspects()
    told = {1: 4, 2: 9, 3: 100}
    suspects.note_death(told)
    suspects.note_death(told | {3: 150})
    assert set(suspects.admit(told)) == {1}
    assert not suspects.is_cleared({1: 4 + WELL_PAST - 1})
    assert suspects.is_cleared({1: 4 + WELL_PAST})
    assert suspects.is_cleared({})
    assert set(suspects.admit(told)) == {2}
    assert suspects.admit({2: 50, 3: 150}) is None
    assert not suspects.on_trial


def dead_twice(*requests):
    suspects, told = Suspects(), dict.fromkeys(requests, 0)
    for _ in range(2):
        assert suspects.note_death(told) is None
    return suspects, told


def test_nobody_is_convicted_beside_a_group_that_was_cleared():
    suspects, told = dead_twice(1, 2)
    assert set(suspects.admit(told)) == {1}
    assert set(suspects.admit({2: 0})) == {2}, "1 goes on beside it"
    assert suspects.note_death({1: WELL_PAST + 5, 2: 3}) is None
    assert set(suspects.admit({1: WELL_PAST + 5, 2: 3})) == {2}, "now by itself"
    assert suspects.note_death({1: WELL_PAST + 5, 2: 3}) == 2


def test_nobody_is_convicted_beside_another_of_its_group():
    suspects, told = dead_twice(1, 2, 3, 4)
    assert set(suspects.admit(told)) == {1, 2}
    told[2] = WELL_PAST + 5
    assert suspects.note_death(told) is None
    assert set(suspects.admit(told)) == {1}
    assert suspects.note_death(told) == 1


def test_who_ends_meanwhile_is_not_waited_for():
    suspects = Suspects()
    for _ in range(2):
        suspects.note_death({1: 0, 2: 0, 3: 0, 4: 0})
    assert set(suspects.admit({2: 0, 4: 0})) == {2}
    assert suspects.note_death({4: 0}) is None, "aborted, in the moment of the death"
    assert set(suspects.admit({4: 0})) == {4}
    assert suspects.note_death({4: 3}) == 4
