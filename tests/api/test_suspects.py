"""Whoever kills is found, at a known price, and nobody else is."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoactor.recovery.suspects import CLEARING_TOKENS, MAX_READER_LAG, Suspects


class World:
    """Requests that get tokens in a random order; some kill at a certain token, whenever they get
    there. Their readers are a few tokens behind."""

    def __init__(self, length, poison, seed):
        """By request: how many tokens it wants, and with which it kills."""
        self.length, self.poison, self.dice = dict(length), poison, random.Random(seed)
        self.told = dict.fromkeys(self.length, 0)
        self.suspects, self.convicted, self.deaths, self.trials = Suspects(), [], 0, 0
        self.explained = 0

    def living(self):
        return {one: told for one, told in self.told.items() if told < self.length[one]}

    def run(self):
        while self.living():
            chosen = self.suspects.admit(self.living(), 0.0)
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
                lag = self.dice.randrange(MAX_READER_LAG)
                self.told[row] = max(self.told[row], computed[row] - lag)
                if computed[row] >= self.length[row]:
                    self.told[row] = self.length[row]
                    running.discard(row)
            if chosen is not None and self.suspects.is_cleared(self.living(), 0.0):
                return

    def die(self, computed):
        self.deaths += 1
        assert self.deaths < 1000
        living = self.living()
        verdict = self.suspects.note_death(living, list(living), "runner", 0.0)
        if verdict is not None:
            self.convicted.append(verdict.request)
            self.explained += verdict.deaths
            self.told[verdict.request] = self.length[verdict.request]


@given(
    count=st.integers(1, 80),
    poisons=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_who_kills_is_convicted_and_nobody_else(count, poisons, seed):
    dice = random.Random(seed)
    # Longer than a trial: who is cleared may kill further on, while others are on trial.
    length = {one: dice.randint(1, 5 * CLEARING_TOKENS) for one in range(count)}
    guilty = dice.sample(range(count), min(poisons, count))
    poison = {one: dice.randint(1, length[one]) for one in guilty}
    world = World(length, poison, seed)
    world.run()
    assert sorted(world.convicted) == sorted(guilty)
    # Two deaths until there are suspects, one for each halving, one alone; of several, each may
    # also kill after it was cleared, while others are on trial.
    assert world.deaths <= len(guilty) * (2 + len(guilty) + math.ceil(math.log2(count)))
    assert world.explained <= world.deaths


@pytest.mark.parametrize(("count", "most"), [(1, 3), (2, 4), (64, 9)])
def test_what_one_among_many_costs(count, most):
    for guilty in (0, count // 2, count - 1):
        world = World(dict.fromkeys(range(count), 100), {guilty: 50}, guilty)
        world.run()
        assert world.convicted == [guilty]
        assert world.deaths <= most
        assert world.explained == world.deaths, "nothing is left to count"


class Trial:
    """Suspects, and who was told how much; everybody may have caused each death."""

    def __init__(self, *requests, deaths=0):
        self.suspects, self.told, self.now = Suspects(), dict.fromkeys(requests, 0), 0.0
        for _ in range(deaths):
            assert self.die() is None

    def die(self, kind="runner", accused=None):
        there = list(self.told) if accused is None else accused
        verdict = self.suspects.note_death(self.told, there, kind, self.now)
        return None if verdict is None else verdict.request

    def admit(self):
        chosen = self.suspects.admit(self.told, self.now)
        return None if chosen is None else set(chosen)

    def cleared(self):
        return self.suspects.is_cleared(self.told, self.now)


def test_deaths_apart_make_nobody_a_suspect():
    trial = Trial(1, 2, deaths=1)
    assert trial.admit() is None
    trial.told = {1: MAX_READER_LAG, 3: 0}
    assert trial.die() is None
    assert trial.admit() is None


def test_time_counts_as_well_as_tokens():
    """Slow streams: a token each half a second, and a death each four seconds."""
    trial = Trial(1, 2)
    for _ in range(10):
        assert trial.die() is None
        assert trial.admit() is None
        trial.now += 4.0
        trial.told = {one: told + 8 for one, told in trial.told.items()}


def test_a_slow_request_that_gets_nowhere_is_a_suspect():
    trial = Trial(1)
    for _ in range(2):
        assert trial.die() is None
        trial.admit()
        trial.now += 20.0
    assert trial.die() == 1


def test_a_death_that_is_no_evidence_makes_nobody_a_suspect():
    trial = Trial(1)
    for _ in range(10):
        assert trial.die(accused=[]) is None
        assert trial.admit() is None


def test_who_was_not_there_is_no_suspect():
    """A tokenizer dies while streams decode that it has tokenized long ago."""
    trial = Trial(1, 2, 3)
    for _ in range(2):
        assert trial.die("tokenizer", accused=[3]) is None
        trial.admit()
    assert set(trial.suspects.on_trial) == {3}
    assert trial.die("tokenizer", accused=[3]) == 3


def test_deaths_of_different_kinds_are_no_pattern():
    trial = Trial(1)
    for kind in ("runner", "detokenizer", "control", "grammar"):
        assert trial.die(kind) is None
        assert trial.admit() is None


def test_what_kills_otherwise_during_a_trial_is_found_too():
    """Suspects of one kind of death are tried while another request kills nodes of another kind."""
    trial = Trial(1, 2, 3, 4)
    trial.die("runner", [1, 2, 3])
    trial.die("runner", [1, 2, 3])
    convicted, deaths = None, 0
    while convicted is None:
        chosen = trial.admit() or set(trial.told)
        assert deaths < 10
        if 4 not in chosen:
            trial.told |= dict.fromkeys(chosen, CLEARING_TOKENS)
            assert trial.cleared()
            continue
        convicted, deaths = trial.die("detokenizer", sorted(chosen)), deaths + 1
    assert convicted == 4


@pytest.mark.parametrize(("kind", "accused"), [("runner", []), ("tokenizer", [1])])
def test_another_death_during_a_trial_proves_nothing(kind, accused):
    trial = Trial(1, deaths=2)
    assert trial.admit() == {1}
    assert trial.die(kind, accused) is None
    assert trial.admit() == {1}, "it is tried again"
    assert trial.suspects.is_alone
    assert trial.die() == 1


def test_a_group_that_is_cleared_makes_room_for_the_next():
    trial = Trial(1, 2, 3, 4, 5)
    trial.die()
    trial.told |= {5: 50}
    trial.die()
    trial.told[6] = 0  # it comes later
    assert trial.admit() == {1, 2, 6}, "5 was there, 6 was not"
    assert not trial.suspects.is_alone
    trial.told |= {1: CLEARING_TOKENS - 1, 2: CLEARING_TOKENS}
    assert not trial.cleared()
    trial.told[1] += 1
    assert trial.cleared()
    assert trial.admit() == {3, 4, 6}
    assert set(trial.suspects.on_trial) == {3, 4}
    trial.told |= {3: CLEARING_TOKENS, 4: CLEARING_TOKENS}
    assert trial.cleared()
    assert trial.admit() is None


def test_a_slow_group_is_cleared_after_some_tokens_and_seconds():
    trial = Trial(1, deaths=2)
    trial.admit()
    trial.told[1], trial.now = 8, 3.9
    assert not trial.cleared()
    trial.now = 4.1
    assert trial.cleared()


def test_nobody_is_convicted_beside_others():
    trial = Trial(1, 2, deaths=2)
    assert trial.admit() == {1}
    assert trial.suspects.is_alone
    trial.told[1] = CLEARING_TOKENS
    assert trial.cleared()
    assert trial.admit() == {2}, "1 goes on beside it"
    assert not trial.suspects.is_alone
    assert trial.die() is None
    assert trial.admit() == {2}, "now by itself"
    assert trial.suspects.is_alone
    assert trial.die() == 2


def test_who_ends_meanwhile_is_not_waited_for():
    trial = Trial(1, 2, 3, 4, deaths=2)
    trial.told = {2: 0, 4: 0}
    assert trial.admit() == {2}
    trial.told = {4: 0}
    assert trial.die() is None, "2 was aborted, in the moment of the death"
    assert trial.admit() == {4}
    assert trial.die() == 4
