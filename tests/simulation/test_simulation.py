"""Whatever arrives, in whatever order messages interleave: the right answers, and an end.

Planted bugs are found by seeds that `killers.py` remembers, and rewrites:

    python -m tests.simulation.killers
"""

import contextlib
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from nanoactor.runtime.codec import _SCHEMAS
from tests.commit import commit_number
from tests.simulation.killers import kills, remembered, search
from tests.simulation.mutations import MUTATIONS, Mutation, planted
from tests.simulation.play import play
from tests.simulation.scenario import draw
from tests.simulation.shrinking import report
from tests.simulation.world import World

ROOT = Path(__file__).parents[2]

# What a million simulated tokens must have been about, at the very least.
EXPECTED = dict(
    hits=100_000,
    evictions=100_000,
    mixed_steps=10_000,
    requests=10_000,
    aborted=3_000,
    overruns=3_000,
    preemptions=1_000,
    refused=500,
)
EXPECTED |= {"sat out": 1_000, "aborts that overtook": 1_000, "stop strings": 500, "choiceless": 20}
EXPECTED |= {"chosen under masks": 1_000, "rows behind free text": 5, "rows of runs": 100}
EXPECTED |= {"frozen rows": 1_000, "rows with states": 10_000, "copied states": 100}
EXPECTED |= {"planned deep beside stepwise ones": 50, "killed by a request": 5}
EXPECTED |= {"ended for the reader": 100, "refused by the machine": 5}
# What the first seeds are about: always the same, so that scenarios drawn otherwise show.
FIRST = dict(
    hits=1_000,
    evictions=500,
    mixed_steps=50,
    requests=100,
    aborted=50,
    overruns=10,
    preemptions=5,
    refused=5,
)
FIRST |= {"sat out": 1, "aborts that overtook": 20, "stop strings": 2, "forks": 5}
FIRST |= {"admitted by the frontend": 3}
FIRST |= {"chosen under masks": 200, "rows behind free text": 1, "frozen rows": 10}
FIRST |= {"rows with states": 500}


def play_on_every_core(first: int, tokens: int) -> Counter:
    """So many tokens, each core with seeds of its own; returns what was counted."""
    cores = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "tests.simulation.play"]
    total: Counter = Counter()
    with contextlib.ExitStack() as stack:
        players = []
        for core in range(cores):
            arguments = [str(first + core), str(cores), str(-(-tokens // cores))]
            player = subprocess.Popen(
                [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            players.append(stack.enter_context(player))
            stack.callback(player.kill)
        for player in players:
            told = player.communicate()[0]
            assert player.returncode == 0, told
            total += Counter(json.loads(told))
    return total


OUTSIDE = {"HoldClock", "MaskClock"}
"""The scheduler's messages to itself cross no edge."""


def test_the_first_seeds_hold_every_kind_of_traffic_and_every_message():
    # In 84 an output goes on after a death; 72 pools; 77 does without an image; 8 has states.
    total = play(0, tokens=12_000) + play(84) + play(72) + play(77)
    assert missing(total, FIRST) == {}
    prefixes = ("nanoactor.server", "nanoactor.runtime", "nanoactor.fleet", "nanoactor.ray")
    known = {
        schema.cls.__name__
        for schema in _SCHEMAS.values()
        if schema.cls.__module__.startswith("nanoactor.")
        and not schema.cls.__module__.startswith(prefixes)
    }
    never = {name for name in known if not total[f"message {name}"]}
    assert never == OUTSIDE, "the simulation must play them, and its oracle know them"


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_seeds_that_no_commit_has_played():
    """They may be anything: one scenario may use up all tokens and abort nobody."""
    assert play_on_every_core(commit_number(), 50_000)["tokens"] >= 50_000


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_kind_of_traffic():
    first = commit_number()
    total = play_on_every_core(first, 1_000_000)
    missed = missing(total, EXPECTED)
    assert not missed, f"from seed {first} on, {total['tokens']} tokens were about: {missed}"


def missing(total: Counter, least: dict[str, int]) -> dict[str, int]:
    """What there was less of than there must be."""
    return {name: total[name] for name in least if total[name] < least[name]}


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)  # half an hour of two cores that have nothing else to do
def test_ten_million_tokens_of_every_kind_of_traffic():
    assert play_on_every_core(1_000_000, 10_000_000)["tokens"] >= 10_000_000


def test_a_seed_is_one_course_of_events():
    def stories(seed):
        world = World(draw(seed), record=True)
        return str(world.play().stories)

    assert stories(3) == stories(3)
    assert len({stories(seed) for seed in range(3)}) == 3


# Nobody goes on any more, and minutes of callers who tick on end it.
SLOW = {"who is held keeps its place from answers to the same request"}


@pytest.mark.drawn(3)
@pytest.mark.timeout(600)
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(m, id=m.what, marks=pytest.mark.long if m.what in SLOW else ())
        for m in MUTATIONS
    ],
)
def test_the_simulation_finds(mutation):
    seed = remembered().get(mutation.what)
    if seed is not None and kills(mutation, seed):
        return
    found = search(mutation)
    assert found is not None, "not found"
    pytest.fail(
        f"seed {seed} does not find it, seed {found} does: "
        "have it remembered by `python -m tests.simulation.killers`"
    )


def test_there_are_twenty_planted_bugs_and_no_two_alike():
    patches = [m for m in MUTATIONS if isinstance(m, Mutation)]
    assert len({(m.module, m.old, m.new) for m in patches}) == len(patches) >= 20
    assert len({m.what for m in MUTATIONS}) == len(MUTATIONS)


def test_planted_bugs_use_no_name_that_is_not_there(tmp_path):
    """An undefined name would be found instead of the bug."""
    for number, bug in enumerate(MUTATIONS):
        if isinstance(bug, Mutation):
            source = inspect.getsource(importlib.import_module(bug.module))
            (tmp_path / f"bug{number}.py").write_text(source.replace(bug.old, bug.new))
    options = ["--isolated", "--select", "F821", "--output-format", "concise"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *options, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_a_failing_seed_shrinks_and_tells_its_stories():
    (bug,) = [m for m in MUTATIONS if m.what == "a match leaves nothing to compute"]
    with planted(bug):
        scenario = next(draw(seed) for seed in range(1000) if fails(draw(seed)))
        text = report(scenario, 600)  # far from the end, however busy the machine
    assert len(scenario.asks) >= 12
    assert 1 <= text.count("submitted: ") <= 4
    for line in ("shrunk to Scenario(", "gets slot", "hit of", "row 0+"):
        assert line in text


def fails(scenario):
    try:
        World(scenario).play()
    except Exception:
        return True
    return False
