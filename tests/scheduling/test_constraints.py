"""What is counted of masks: by the steps that were planned without them."""

import dataclasses

import numpy as np

from nanoactor.grammar.messages import (
    BeginGrammar,
    CloseGrammars,
    DropMasks,
    ForcedTokens,
    MasksReady,
    OpenGrammar,
)
from nanoactor.messages import FreeText, RequestSpec, Stopping, TextOptions
from nanoactor.scheduling.constraints import Constraints
from nanoactor.scheduling.sequence import Phase

OPTIONS = Stopping(9, 0, (), ()), TextOptions((), False, True, 0)
SPEC = RequestSpec(0, b"", *OPTIONS, grammar="{}")


@dataclasses.dataclass
class Answer:
    """Of a sequence, what constraints look at."""

    uid: int
    tokens: np.ndarray
    spec: RequestSpec = SPEC
    prompt_length: int = 1
    prompt_logprobs: int = -1
    slot: int = 0
    asked: int = -1
    scheduled: int = 0
    phase: Phase = Phase.RUNNING
    limit: int = 100
    """The length at which it ends."""
    is_constrained: bool = True

    @property
    def free(self):
        return None if self.is_constrained else FreeText(True, -1, close_id=99, call_id=-1)

    @property
    def length(self):
        return len(self.tokens)


def ready(answer, rank):
    return MasksReady(rank, np.array([answer.uid]), np.array([answer.length], np.int32))


def test_masks_are_counted_by_the_steps_that_were_planned_without_them():
    constraints, step = Constraints(2), 0
    for uid, waits in enumerate((0, 1, 3, 0)):
        answer = Answer(uid, np.zeros(1, np.int32))
        constraints.open(answer)
        constraints.note_ready(ready(answer, 0))
        step += 1
        assert constraints.choose([answer], step) == []  # its prompt is not planned
        answer.scheduled = 1
        for _ in range(waits):
            step += 1
            assert constraints.choose([answer], step) == []
            # The step comes to nothing, and is tried again.
            assert constraints.choose([answer], step) == []
        constraints.note_ready(ready(answer, 1))
        step += 1
        assert [row.sequence for row in constraints.choose([answer], step)] == [answer]
        assert constraints.choose([answer], step + 1) == []
    figures = constraints.figures()
    assert figures["constrained"] == 4
    assert figures["masks_at_once"] == 2
    assert figures["masks_next_step"] == 1
    assert figures["masks_later"] == 1


def test_forced_tokens_are_counted_when_they_are_taken():
    constraints = Constraints(1)
    answer = Answer(0, np.zeros(1, np.int32))
    constraints.open(answer)
    run = np.array([7, 8, 9], np.int32)
    first, count = np.array([1], np.int32), np.array([3], np.int32)
    constraints.note_forced(ForcedTokens(np.array([0]), first, count, run))
    assert constraints.take_runs([answer]) == []  # its prompt is not planned
    assert constraints.figures()["forced_tokens"] == 0
    answer.scheduled = 1
    [(sequence, tokens)] = constraints.take_runs([answer])
    assert sequence is answer
    assert tokens.tolist() == [7, 8, 9]
    assert constraints.figures()["forced_tokens"] == 3


def test_who_waits_with_forced_tokens_has_its_answer_and_may_wait_for_long():
    constraints = Constraints(1)
    answer = Answer(0, np.zeros(1, np.int32))
    constraints.open(answer)
    assert constraints.waits
    run = np.array([7], np.int32)
    first, count = np.array([1], np.int32), np.array([1], np.int32)
    constraints.note_forced(ForcedTokens(np.array([0]), first, count, run))
    assert not constraints.waits
    assert [constraints.tick() for _ in range(5)] == [[]] * 5
    answer.scheduled = 1
    assert constraints.take_runs([answer])
    assert constraints.waits
    assert constraints.tick() == []  # the mask behind them is due within a period of its own
    assert constraints.tick() == [0]


def test_nothing_is_awaited_while_text_is_free():
    constraints = Constraints(1)
    answer = Answer(3, np.zeros(4, np.int32), is_constrained=False)
    constraints.open(answer)
    constraints.open(answer)  # again, behind a preemption
    [(_, opened)] = constraints.flush()
    assert type(opened) is OpenGrammar
    assert opened.position == -1
    assert not len(opened.token_ids)
    assert [constraints.tick() for _ in range(5)] == [[]] * 5
    assert (len(constraints), constraints.waits) == (1, False)
    constraints.begin(answer, [7])
    [(_, begun)] = constraints.flush()
    assert type(begun) is BeginGrammar
    assert (begun.uid, begun.position, begun.token_ids.tolist()) == (3, 4, [7])
    assert constraints.waits
    assert [constraints.tick() for _ in range(2)] == [[], [3]]
    constraints.note_ready(ready(answer, 0))
    constraints.pause(3, 8)
    assert not constraints.waits
    constraints.begin(answer, [9])
    [(_, begun)] = constraints.flush()
    assert begun.token_ids.tolist() == [8, 9]


def test_who_ends_in_free_text_is_told_like_all_others():
    constraints = Constraints(1)
    answer = Answer(3, np.zeros(4, np.int32), is_constrained=False)
    constraints.open(answer)
    constraints.flush()
    constraints.close(3)
    assert [type(message) for _, message in constraints.flush()] == [DropMasks, CloseGrammars]
    constraints.check_idle()
    constraints.close(3)
    assert constraints.flush() == []


def test_the_grammar_is_told_where_an_answer_ends():
    constraints, answer = Constraints(1), Answer(7, np.arange(1), limit=13)
    constraints.open(answer)
    ((_, message),) = constraints.flush()
    assert message.end == 13
