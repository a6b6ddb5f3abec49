"""The budget against a model of it: no block is lost, nothing is handed out before its fence."""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoactor.errors import ProtocolBug
from nanoactor.scheduling.resources.budget import BlockBudget


class BudgetMachine(RuleBasedStateMachine):
    """Random operations as a scheduler makes them, and what they come to, counted plainly."""

    @initialize(blocks=st.integers(1, 20), slots=st.integers(1, 5))
    def begin(self, blocks, slots):
        self.budget = BlockBudget(blocks, slots)
        self.blocks, self.slots = blocks, slots
        self.credits, self.debited = blocks, 0
        self.fenced = []
        """(fence, blocks) that are answered and not passed."""
        self.due = []
        """(turn, fence) of what was given up and is not answered."""
        self.turn = 0
        self.held = set()
        self.given_up = {}
        """By slot: its fence."""
        self.planned = self.completed = 0

    def passed(self, fence):
        return fence <= self.completed

    def pass_fences(self):
        self.credits += sum(blocks for fence, blocks in self.fenced if self.passed(fence))
        self.fenced = [entry for entry in self.fenced if not self.passed(entry[0])]
        self.given_up = {s: fence for s, fence in self.given_up.items() if not self.passed(fence)}

    def free(self):
        return set(range(self.slots)) - self.held - self.given_up.keys()

    # -- operations ---------------------------------------------------------------------------

    @rule(blocks=st.integers(0, 8))
    def debit(self, blocks):
        if blocks > self.credits:
            with pytest.raises(ProtocolBug, match=f"{blocks} blocks: only {self.credits} credits"):
                self.budget.debit(blocks)
            return
        self.budget.debit(blocks)
        self.credits -= blocks
        self.debited += blocks

    @rule(data=st.data())
    def refund(self, data):
        blocks = data.draw(st.integers(0, self.debited))
        self.budget.refund(blocks)
        self.credits += blocks
        self.debited -= blocks

    @rule(steps=st.integers(0, 3))
    def plan(self, steps):
        self.planned += steps

    @rule()
    def expect(self):
        self.turn += 1
        self.budget.expect(self.turn, self.planned)
        self.due.append((self.turn, self.planned))

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def answer(self, data):
        count = data.draw(st.integers(1, len(self.due)))
        answered, self.due = self.due[:count], self.due[count:]
        found = []
        for fence in sorted({fence for _, fence in answered}):
            found.append((fence, data.draw(st.integers(0, self.debited))))
            self.debited -= found[-1][1]
        self.budget.answer(answered[-1][0], found)
        self.fenced += found
        self.pass_fences()

    @rule(fence=st.integers(31, 40))
    def answer_what_is_not_due(self, fence):
        with pytest.raises(ProtocolBug, match=f"returned with fence {fence}"):
            self.budget.answer(0, [(fence, 1)])

    @precondition(lambda self: self.completed < self.planned)
    @rule(data=st.data())
    def complete(self, data):
        self.completed = data.draw(st.integers(self.completed + 1, self.planned))
        self.budget.complete(self.completed)
        self.pass_fences()

    @rule()
    def allocate_slot(self):
        if not self.free():
            with pytest.raises(ProtocolBug, match=f"none of the {self.slots} slots is free"):
                self.budget.allocate_slot()
            return
        expected = min(self.free())
        assert self.budget.allocate_slot() == expected
        self.held.add(expected)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_slot(self, data):
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.budget.release_slot(slot, self.planned)
        self.held.remove(slot)
        self.given_up[slot] = self.planned
        self.pass_fences()

    # -- what always holds --------------------------------------------------------------------

    @invariant()
    def no_block_is_lost_and_none_is_made(self):
        assert self.budget.credits + self.budget.pending + self.debited == self.blocks
        assert self.budget.credits == self.credits >= 0

    @invariant()
    def it_says_what_is_there_and_due(self):
        assert self.budget.free_slots == len(self.free())
        assert self.budget.oldest_unanswered == next((fence for _, fence in self.due), None)

    @invariant()
    def it_is_idle_when_all_is_back_or_behind_a_fence(self):
        if self.debited or self.held:
            with pytest.raises(ProtocolBug, match="idle, but"):
                self.budget.check_idle()
        else:
            self.budget.check_idle()


TestBudgetAgainstItsModel = BudgetMachine.TestCase
TestBudgetAgainstItsModel.settings = settings(
    max_examples=125,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


def test_what_is_freed_counts_when_its_fence_has_passed():
    budget = BlockBudget(10, 2)
    budget.debit(4)
    slot = budget.allocate_slot()
    budget.release_slot(slot, fence=7)
    budget.expect(turn=1, fence=7)
    budget.answer(1, [(7, 4)])
    budget.complete(6)
    assert (budget.credits, budget.pending, budget.free_slots) == (6, 4, 1)
    budget.complete(7)
    assert (budget.credits, budget.pending, budget.free_slots) == (10, 0, 2)
    assert budget.allocate_slot() == slot


def test_a_late_answer_whose_fence_has_passed_counts_at_once():
    budget = BlockBudget(10, 1)
    budget.debit(3)
    budget.expect(turn=1, fence=2)
    budget.complete(5)
    budget.answer(1, [(2, 3)])
    assert (budget.credits, budget.pending) == (10, 0)
