"""Doubles play requests from begin to end, again and again, and touch nothing of the engine's."""

from nanoactor.actors.detokenizer import DetokenizerActor
from nanoactor.messages.engine import Open, Step, Tokens
from nanoactor.runner.batch.batch import BatchTraits
from nanoactor.runner.batch.rehearsal_batch import RehearsalBatch
from nanoactor.scheduling.rehearsal import Rehearsal, first_step, text_messages
from nanoactor.text.detokenizer import Detokenizer


def test_every_rehearsal_computes_a_prompt_and_leaves_nothing():
    rehearsal = Rehearsal(16)
    for number in range(1, 40):
        steps = [sent for sent in rehearsal.run() if type(sent) is Step]
        assert [step.step for step in steps] == [number]
        assert len(steps[0].token_ids) == 512, "nothing is found in its prefix cache"
        rehearsal._scheduler.check_idle()
        rehearsal._manager.check()
        assert not rehearsal._scheduler.live
        assert not rehearsal._manager.num_held_slots


def test_a_rehearsal_that_is_broken_off_goes_on_where_it_stopped():
    rehearsal = Rehearsal(64)
    playing = rehearsal.run()
    assert type(next(playing)) is Step
    sent = [type(message) for message in playing]
    assert Tokens in sent
    assert not rehearsal._scheduler.live


def test_the_detokenizer_s_double_keeps_nothing():
    actor = DetokenizerActor.__new__(DetokenizerActor)
    actor._detokenizer, actor._rehearsal_detokenizer = Detokenizer(None), Detokenizer(None)
    actor._delta_bytes = 1 << 16
    for _ in range(3):
        assert [type(message) for message in actor.rehearse()] == [Open, Tokens]
        assert actor._rehearsal_detokenizer.entries == 0
        assert not actor._rehearsal_detokenizer.pending
    assert actor._detokenizer.entries == 0
    assert {type(message) for message in text_messages()} == {Open, Tokens}


def test_a_batch_s_double_lays_the_same_step_out_each_time():
    double = RehearsalBatch(BatchTraits(tokens_per_program=64), 16)
    first, second = double.update(), double.update()
    assert (first.prefill.token_ids == second.prefill.token_ids).all()
    assert (first.inputs.changes[0] == second.inputs.changes[0]).all()
    assert len(first.prefill.token_ids) == len(first_step(16).token_ids) == 512
