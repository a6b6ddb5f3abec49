"""What is counted of masks: by the steps that were planned without them."""

import dataclasses
from types import SimpleNamespace

import numpy as np

from nanoactor.messages.engine import FreeText, RequestSpec, Stopping, TextOptions
from nanoactor.messages.grammar import (
    BeginGrammar,
    CloseGrammars,
    ForcedTokens,
    MaskClock,
    MasksReady,
    OpenGrammar,
)
from nanoactor.scheduling.features.constraints import Constraints
from nanoactor.scheduling.sequences.grammar_state import GrammarState
from nanoactor.scheduling.sequences.sequence import Phase

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
    scheduled: int = 0
    phase: Phase = Phase.RUNNING
    limit: int = 100
    """The length at which it ends."""
    free: FreeText | None = None

    def __post_init__(self):
        self.grammar = GrammarState.restore(self.free, self.tokens[1:].tolist())

    @property
    def length(self):
        return len(self.tokens)


class Turn:
    """Of a turn, the masks that the runners may forget."""

    def __init__(self):
        self.dropped = []

    def drop_masks(self, masks):
        self.dropped.append(masks)


def constraints_of(*answers, ranks=1):
    """Constraints with these running, and those that went on behind their newest token."""
    lowered = []
    running = SimpleNamespace(constrained=list(answers), rewind=lowered.append)
    output = SimpleNamespace(discard_results=lambda sequence, step: None)
    pipeline = SimpleNamespace(planned=0)
    constraints = Constraints(running, output, pipeline, ranks=ranks)
    for answer in answers:
        constraints.admit(answer, turn=1)
    return constraints, lowered


def choose(constraints, step):
    return [row.sequence for row in constraints.plan_rows(step, [])]


def sent(constraints):
    return [message for _, message in constraints.flush(Turn())]


def tick(constraints):
    return [
        sequence.uid for sequence, _ in constraints.HANDLERS[MaskClock](constraints, MaskClock())
    ]


def handle(constraints, event):
    assert not constraints.HANDLERS[type(event)](constraints, event)


def ready(answer, rank):
    return MasksReady(rank, np.array([answer.uid]), np.array([answer.length], np.int32))


def test_masks_are_counted_by_the_steps_that_were_planned_without_them():
    step = 0
    answers = [Answer(uid, np.zeros(1, np.int32)) for uid in range(4)]
    constraints, _ = constraints_of(*answers, ranks=2)
    for answer, waits in zip(answers, (0, 1, 3, 0), strict=True):
        handle(constraints, ready(answer, 0))
        step += 1
        assert choose(constraints, step) == []  # its prompt is not planned
        answer.scheduled = 1
        for _ in range(waits):
            step += 1
            assert choose(constraints, step) == []
            # The step comes to nothing, and is tried again.
            assert choose(constraints, step) == []
        handle(constraints, ready(answer, 1))
        step += 1
        assert choose(constraints, step) == [answer]
        assert choose(constraints, step + 1) == []
    figures = constraints.figures()
    assert figures["constrained"] == 4
    assert figures["masks_at_once"] == 2
    assert figures["masks_next_step"] == 1
    assert figures["masks_later"] == 1


def test_forced_tokens_are_counted_when_they_are_taken():
    answer = Answer(0, np.zeros(1, np.int32))
    constraints, _ = constraints_of(answer)
    handle(constraints, forced(7, 8, 9))
    assert constraints.forced() == []  # its prompt is not planned
    assert constraints.figures()["forced_tokens"] == 0
    answer.scheduled = 1
    [(sequence, tokens)] = constraints.forced()
    assert sequence is answer
    assert tokens.tolist() == [7, 8, 9]
    assert constraints.figures()["forced_tokens"] == 3


def forced(*run):
    """Tokens that follow the first of request 0."""
    counts = np.array([len(run)], np.int32)
    return ForcedTokens(np.array([0]), np.array([1], np.int32), counts, np.array(run, np.int32))


def test_who_waits_with_forced_tokens_has_its_answer_and_may_wait_for_long():
    answer = Answer(0, np.zeros(1, np.int32))
    constraints, _ = constraints_of(answer)
    assert constraints.is_waiting
    handle(constraints, forced(7))
    assert not constraints.is_waiting
    assert [tick(constraints) for _ in range(5)] == [[]] * 5
    answer.scheduled = 1
    assert constraints.forced()
    assert constraints.is_waiting
    assert tick(constraints) == []  # the mask behind them is due within a period of its own
    assert tick(constraints) == [0]


def test_nothing_is_awaited_while_text_is_free():
    answer = Answer(3, np.zeros(4, np.int32), free=FreeText(False, -1, close_id=-1, call_id=7))
    constraints, lowered = constraints_of(answer)
    constraints.admit(answer, turn=2)  # again, behind a preemption
    [opened] = sent(constraints)
    assert type(opened) is OpenGrammar
    assert opened.position == -1
    assert not len(opened.token_ids)
    assert [tick(constraints) for _ in range(5)] == [[]] * 5
    assert (constraints.figures()["constrained"], constraints.is_waiting) == (1, False)
    answer.tokens = np.array([0, 1, 2, 7], np.int32)
    constraints.note_token(answer)
    [begun] = sent(constraints)
    assert type(begun) is BeginGrammar
    assert (begun.uid, begun.position, begun.token_ids.tolist()) == (3, 4, [7])
    assert (constraints.is_waiting, lowered) == (True, [answer])
    assert [tick(constraints) for _ in range(2)] == [[], [3]]
    handle(constraints, ready(answer, 0))
    assert not constraints.is_waiting


def test_thoughts_may_begin_behind_the_first_token_and_the_grammar_is_told_of_it():
    answer = Answer(3, np.zeros(1, np.int32), free=FreeText(False, 5, close_id=6, call_id=-1))
    constraints, lowered = constraints_of(answer)
    sent(constraints)
    answer.tokens = np.array([0, 5], np.int32)
    constraints.note_token(answer)
    assert (sent(constraints), constraints.is_waiting, lowered) == ([], False, [answer])
    answer.tokens = np.array([0, 5, 1, 6], np.int32)
    constraints.note_token(answer)
    [begun] = sent(constraints)
    assert (begun.position, begun.token_ids.tolist()) == (4, [5, 6])
    assert lowered == [answer, answer]


def test_who_ends_in_free_text_is_told_like_all_others():
    answer = Answer(3, np.zeros(4, np.int32), free=FreeText(True, -1, close_id=99, call_id=-1))
    constraints, _ = constraints_of(answer)
    sent(constraints)
    constraints.close(answer)
    turn = Turn()
    assert [type(message) for _, message in constraints.flush(turn)] == [CloseGrammars]
    assert [masks.uids.tolist() for masks in turn.dropped] == [[3]]
    constraints.check_idle()
    constraints.close(answer)
    assert sent(constraints) == []


def test_the_grammar_is_told_where_an_answer_ends():
    constraints, _ = constraints_of(Answer(7, np.arange(1), limit=13))
    (message,) = sent(constraints)
    assert message.end == 13


def test_a_last_gate_in_text_that_goes_on_lowers_it_as_the_device_has_frozen_it():
    free = FreeText(True, -1, close_id=6, call_id=7)
    answer = Answer(3, np.zeros(4, np.int32), free=free)
    constraints, lowered = constraints_of(answer)
    sent(constraints)
    for token, expected in ((5, 0), (7, 1), (6, 1)):  # a call in thoughts, and their end
        answer.tokens = np.append(answer.tokens, np.int32(token))
        constraints.note_token(answer)
        assert len(lowered) == expected
    assert sent(constraints) == []
    answer.tokens = np.append(answer.tokens, np.int32(7))
    constraints.note_token(answer)
    assert len(lowered) == 2
    assert [type(message) for message in sent(constraints)] == [BeginGrammar]
