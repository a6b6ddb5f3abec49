"""How many threads a step on the CPU gets: by what the machine gives, and by what steps took."""

import dataclasses
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.runner.timing.threads import ThreadChoice, usable_cores


@dataclasses.dataclass(frozen=True)
class Step:
    rows: int
    prefill: object | None = None


class Machine:
    """Steps take so long with one thread and with all, and a little noise."""

    def __init__(self, choice, one, all_, seed=0):
        self.choice, self.times, self.rng = choice, {1: one, 4: all_}, random.Random(seed)

    def run(self, steps, step=None):
        """The numbers of threads of so many steps."""
        step = step or Step(8)
        chosen = []
        for _ in range(steps):
            chosen.append(self.choice.choose(step))
            seconds = self.times[chosen[-1]] * step.rows * (1 + 0.05 * self.rng.random())
            self.choice.note(step, seconds)
        return chosen


@pytest.mark.parametrize(("one", "all_", "best"), [(1.0, 0.3, 4), (1.0, 3.0, 1), (1.0, 50.0, 1)])
def test_the_faster_is_taken_and_the_other_seldom_tried(one, all_, best):
    chosen = Machine(ThreadChoice(4), one, all_).run(4000)
    tried = [each for each in chosen if each != best]
    assert 3 < len(tried) < 0.02 * len(chosen)
    if max(one, all_) > 2 * min(one, all_):
        assert len(tried) < 10


def test_a_neighbour_who_comes_and_goes_is_noticed():
    machine = Machine(ThreadChoice(4), 1.0, 0.4)
    assert machine.run(100)[-1] == 4
    machine.times[4] = 20.0  # the cores are somebody else's
    late = machine.run(20)
    assert late[-1] == 1
    assert late.count(4) <= 2
    machine.times[4] = 0.4
    assert 4 in machine.run(1100)
    assert machine.run(200)[-1] == 4


def test_sizes_are_judged_apart():
    """A second thread pays for a prompt where it does not for a row."""
    choice = ThreadChoice(4)
    Machine(choice, 1.0, 3.0).run(50, Step(1))
    Machine(choice, 1.0, 0.3).run(50, Step(512, prefill=()))
    assert choice.choose(Step(1)) == 1
    assert choice.choose(Step(512, prefill=())) == 4
    assert choice.choose(Step(300, prefill=())) in (1, 4)


@pytest.mark.parametrize("best", [1, 4])
def test_new_sizes_begin_with_what_the_nearest_has_found(best):
    """Prompts above all, each of them slow: one slow step of all sizes, and a probe."""
    choice = ThreadChoice(4)
    machine = Machine(choice, 1.0 if best == 1 else 3.0, 3.0 if best == 1 else 1.0)
    machine.run(2, Step(256, prefill=()))
    for rows in (3000, 500, 20):
        assert machine.run(3, Step(rows, prefill=())) == [best] * 3
    assert machine.run(6, Step(8)).count(1) == 3, "prompts say nothing about decode steps"
    assert machine.run(4, Step(100))[:3] == [best] * 3


def test_what_the_nearest_has_found_is_soon_questioned():
    choice = ThreadChoice(4)
    Machine(choice, 1.0, 3.0).run(50, Step(1))
    chosen = Machine(choice, 1.0, 0.3).run(30, Step(100))
    assert chosen[0] == 1
    assert chosen[10:] == [4] * 20


@given(st.lists(st.tuples(st.integers(1, 600), st.booleans(), st.floats(1e-6, 1e3))))
def test_one_thread_or_all_and_nothing_else(steps):
    choice = ThreadChoice(3)
    for rows, prefill, seconds in steps:
        step = Step(rows, () if prefill else None)
        assert choice.choose(step) in (1, 3)
        choice.note(step, seconds)


def test_a_single_core_is_never_asked():
    choice = ThreadChoice(1)
    assert choice.choose(Step(5)) == 1
    choice.note(Step(5), 1.0)
    assert not choice._timings


# -- what the machine gives ------------------------------------------------------------------


def files(root, **contents):
    for name, text in contents.items():
        path = root / name.replace("__", "/").replace("_max", ".max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 16), ("150000 100000", 1), ("400000 100000", 4), ("50000 100000", 1)],
)
def test_a_containers_quota_counts(many, tmp_path, quota, cores):
    files(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpu_max=quota)
    assert usable_cores(tmp_path) == cores


def test_the_tightest_of_all_groups_above_counts(many, tmp_path):
    files(
        tmp_path,
        proc__self__cgroup="0::/kube/pod\n",
        sys__fs__cgroup__kube__cpu_max="300000 100000",
        sys__fs__cgroup__kube__pod__cpu_max="max 100000",
    )
    assert usable_cores(tmp_path) == 3


def test_version_1_is_understood(many, tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/docker\n1:memory:/docker\n")
    folder = tmp_path / "sys/fs/cgroup/cpu,cpuacct/docker"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("200000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 2
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(tmp_path) == 16


@pytest.mark.parametrize("text", ["", "nonsense", "1 2 3", "100000 0"])
def test_what_cannot_be_read_is_no_limit(many, tmp_path, text):
    files(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpu_max=text)
    assert usable_cores(tmp_path) == 16
    assert usable_cores(tmp_path / "nowhere") == 16


def test_here_it_is_a_number_of_cores():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
