"""Planted bugs that the simulation meets too seldom: a test of one situation finds each."""

from types import SimpleNamespace

import pytest

from nanoactor.recovery.readmission import Readmission
from tests.kv import test_copies
from tests.runner import test_renewal
from tests.scheduling import test_constraints, test_forking, test_schedules, test_table
from tests.simulation.mutations import RARE, planted


def keeps_what_comes_during_a_trial():
    """A request that comes while one is tried alone goes on when the trial is over."""
    readmission = Readmission(max_running=4)
    entry = SimpleNamespace(submit=SimpleNamespace(uid=7), answers=[SimpleNamespace(token_ids=[])])
    entry.is_over = False
    readmission._suspects = SimpleNamespace(is_alone=True, admit=lambda told, now: None)
    assert readmission.defer(entry)
    assert readmission.waiting == 1
    assert readmission.admit_next(now=0.0) == [entry]


FINDERS = {
    "a slot that becomes a copy of a copy in one step is given what the copy had before": (
        test_copies.test_slots_swap_and_a_copy_of_a_copy_is_one_of_its_source
    ),
    "what decode rows compute in the place of forced tokens is left": (
        test_forking.test_what_decode_rows_compute_in_the_place_of_forced_tokens_does_not_survive
    ),
    "a preempted sequence comes back before its results are in": (
        test_schedules.test_who_is_preempted_comes_back_when_its_results_are_in
    ),
    "the queue is not looked at again though a step has taken prompts": (
        test_schedules.test_the_queue_is_looked_at_again_when_a_step_has_taken_prompts
    ),
    "followers are forgotten when the first sequence ends": (
        test_forking.test_an_answer_follows_the_next_when_the_first_ends
    ),
    "the mask of a token that is forced is awaited": (
        test_constraints.test_who_waits_with_forced_tokens_has_its_answer_and_may_wait_for_long
    ),
    "a runner keeps masks and pixels from before a death": (
        test_renewal.test_pixels_and_masks_from_before_are_forgotten
    ),
    "what others share of a slot's blocks is told of the sequence that has the slot now": (
        test_table.test_what_others_share_is_told_of_the_sequence_that_had_the_slot
    ),
    "requests that come during a trial are forgotten": keeps_what_comes_during_a_trial,
}


@pytest.mark.parametrize("bug", RARE, ids=lambda bug: bug.what)
def test_a_bug_is_found(bug):
    finder = FINDERS[bug.what]
    finder()
    with planted(bug), pytest.raises((AssertionError, IndexError)):
        finder()
