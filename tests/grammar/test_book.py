"""The grammar's book with matchers that do as they are told."""

import numpy as np
import pytest

from nanoactor.errors import InvalidRequest, OutOfResources, ProtocolBug
from nanoactor.grammar.book import (
    TURN_MASKS,
    TURN_SECONDS,
    GrammarBook,
    fill_sequentially,
    only_bit,
)
from nanoactor.messages.grammar import (
    MAX_REASON,
    MAX_RUN,
    BeginGrammar,
    CloseGrammars,
    GrammarTokens,
    OpenGrammar,
)

WORDS, END = 2, 60


def row(*ids):
    bits = np.zeros(32 * WORDS, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Script:
    """Allows one set of ids after the other, whatever is taken; fails behind the last."""

    def __init__(self, *allowed):
        self.allowed, self.taken = list(allowed), []

    def consume(self, tokens):
        self.taken += tokens

    def fill(self, out):
        if len(self.taken) == len(self.allowed):
            raise InvalidRequest("too hard" * 1000)
        out[:] = row(*self.allowed[len(self.taken)])


def opened(uid, jumps=False, tokens=(), end=10_000):
    return OpenGrammar(uid, "{}", 10, np.array(tokens, np.int32), jumps, end)


def settle(book):
    """Turns until nothing is left to do."""
    while book.has_work:
        book.advance()


def tokens(*triples):
    uids, positions, ids = zip(*triples, strict=True)
    arrays = np.array(uids, np.int64), np.array(positions, np.int32), np.array(ids, np.int32)
    return GrammarTokens(*arrays)


def book_of(*matchers, jumps=False):
    book = GrammarBook(WORDS, (END,))
    for uid, matcher in enumerate(matchers):
        book.open(opened(uid, jumps))
        book.set_matcher(uid, matcher)
    settle(book)
    return book


def test_only_one_bit_is_found_wherever_it_stands():
    for place in range(32 * WORDS):
        assert only_bit(row(place)) == place
        assert only_bit(row(place, (place + 7) % 64)) is None
    assert only_bit(row()) is None


def test_a_mask_follows_each_token_and_none_comes_twice():
    book = book_of(Script([1], [2, 3], [4]), Script([5, 33], [6]))
    first = book.pop_masks(1)
    assert (first.uids.tolist(), first.positions.tolist()) == ([0], [10])
    assert book.pop_masks(9).masks.tolist() == [row(5, 33).tolist()]
    assert book.pop_masks(9) is None
    book.add_tokens(tokens((1, 10, 33), (0, 10, 1)))
    settle(book)
    both = book.pop_masks(9)
    assert (both.uids.tolist(), both.positions.tolist()) == ([1, 0], [11, 11])
    assert both.masks.tolist() == [row(6).tolist(), row(2, 3).tolist()]


def test_a_token_for_another_position_is_a_bug():
    book = book_of(Script([1], [2]))
    with pytest.raises(
        ProtocolBug, match="its token at position 11, but the token at position 10 was"
    ):
        book.add_tokens(tokens((0, 11, 1)))
        settle(book)


def test_what_was_said_before_a_restart_is_taken_first():
    book, matcher = GrammarBook(WORDS), Script([1], [2], [3])
    book.open(opened(7, tokens=[1, 2]))
    assert book.pop_masks(9) is None
    book.set_matcher(7, matcher)
    settle(book)
    assert matcher.taken == [1, 2]
    assert book.pop_masks(9).positions.tolist() == [12]


def test_ids_that_are_alone_are_forced_up_to_a_choice():
    book = book_of(Script([8], [9], [1, 2], [3], [4, 5]), jumps=True)
    runs, masks = book.pop_runs(), book.pop_masks(9)
    assert (runs.uids.tolist(), runs.positions.tolist()) == ([0], [10])
    assert (runs.counts.tolist(), runs.token_ids.tolist()) == ([2], [8, 9])
    assert (masks.positions.tolist(), masks.masks.tolist()) == ([12], [row(1, 2).tolist()])
    book.add_tokens(tokens((0, 12, 2)))
    settle(book)
    assert book.pop_runs().token_ids.tolist() == [3]


def test_the_end_is_never_forced():
    book = book_of(Script([8], [END]), jumps=True)
    assert book.pop_runs().token_ids.tolist() == [8]
    assert book.pop_masks(9).masks.tolist() == [row(END).tolist()]


def test_nothing_is_forced_for_who_does_not_jump():
    book = book_of(Script([8], [9]))
    assert book.pop_runs() is None
    assert book.pop_masks(9).masks.tolist() == [row(8).tolist()]


def test_a_run_has_an_end_although_the_grammar_has_none():
    book = book_of(Script(*[[8]] * (2 * MAX_RUN)), jumps=True)
    assert book.pop_runs().counts.tolist() == [MAX_RUN]
    assert book.pop_masks(9).positions.tolist() == [10 + MAX_RUN]


def test_a_failure_is_told_once_and_shortly_and_the_answer_is_quiet_then():
    book = book_of(Script([1]), Script([2], [3]))
    book.pop_masks(9)
    book.add_tokens(tokens((0, 10, 1), (1, 10, 2)))
    settle(book)
    failed = book.pop_failures()
    assert failed.uids.tolist() == [0]
    assert failed.errors[0].startswith("structured_outputs: too hard")
    assert len(failed.errors[0]) == MAX_REASON
    assert book.pop_failures() is None
    assert book.pop_masks(9).uids.tolist() == [1]


def test_who_cannot_be_compiled_has_failed():
    book = book_of(InvalidRequest("nonsense"))
    assert book.pop_failures().errors == ["structured_outputs: nonsense"]


def test_an_answer_that_is_over_is_closed_once_with_all_it_had():
    book = book_of(Script([1]), Script([2]), jumps=True)
    book.close(CloseGrammars(np.array([1, 0])))
    last = book.pop_masks(9)
    assert (last.uids.tolist(), last.closed.tolist()) == ([], [1, 0])
    assert (book.pop_masks(9), book.pop_runs(), book.pop_failures()) == (None, None, None)
    book.set_matcher(1, Script([1]))
    settle(book)
    assert len(book) == 0


def free_book(matcher):
    book = GrammarBook(WORDS, (END,))
    book.open(OpenGrammar(0, "{}", -1, np.array((), np.int32), False, 10_000))
    book.set_matcher(0, matcher)
    settle(book)
    return book


def begin(book, position, *ids):
    book.begin(BeginGrammar(0, position, np.array(ids, np.int32)))
    settle(book)


def test_no_mask_is_made_while_text_is_free():
    matcher = Script((1,), (2,), (3,))
    book = free_book(matcher)
    assert book.pop_masks(8) is None
    begin(book, 25, 7)
    masks = book.pop_masks(8)
    assert masks.positions.tolist() == [25]
    assert (masks.masks == row(2)).all()
    assert matcher.taken == [7]
    begin(book, 40, 8)  # more of it was free
    assert book.pop_masks(8).positions.tolist() == [40]
    with pytest.raises(ProtocolBug, match="continues at position 40, but is already at 40"):
        begin(book, 40)


def test_a_grammar_that_fails_is_told_while_text_is_free():
    book = free_book(InvalidRequest("no answer"))
    assert book.pop_failures().uids.tolist() == [0]
    begin(book, 25, 7)
    assert book.pop_masks(8) is None


def test_free_text_may_end_before_the_grammar_is_compiled():
    book = GrammarBook(WORDS, (END,))
    book.open(OpenGrammar(0, "{}", -1, np.array((), np.int32), False, 10_000))
    begin(book, 25, 7)
    assert book.pop_masks(8) is None
    book.set_matcher(0, Script((1,), (2,)))
    settle(book)
    assert book.pop_masks(8).positions.tolist() == [25]


def forced(uid_count, length=10_000, end=10_000):
    """Answers all of whose tokens are forced, in a book that has not made a turn."""
    book = GrammarBook(WORDS, (END,), clock=lambda: 0.0)
    for uid in range(uid_count):
        book.open(opened(uid, jumps=True, end=end))
        book.set_matcher(uid, Script(*[[8]] * length))
    return book


@pytest.mark.parametrize("answers", [1, 3, 128, 1000])
def test_a_turn_forces_no_more_than_its_share_for_all_answers_together(answers):
    """Whatever one request asks for: 1,000 answers, each of a literal without an end."""
    book = forced(answers)
    taken = 0
    for turn in range(1, 50):
        assert book.advance() <= TURN_MASKS
        now = sum(len(entry.matcher.taken) for entry in book._open.values())
        assert now - taken <= TURN_MASKS, f"turn {turn}"
        taken = now


def test_who_comes_later_waits_for_one_round_of_the_others():
    book = forced(20)
    book.advance()
    book.open(opened(99))
    book.set_matcher(99, Script([1, 2]))
    book.advance()
    assert 99 in book.pop_masks(99).uids.tolist()


def test_a_turn_ends_when_its_time_is_over():
    ticks = iter(range(1000))
    book = GrammarBook(WORDS, (END,), clock=lambda: next(ticks) * TURN_SECONDS / 3)
    for uid in range(30):
        book.open(opened(uid))
        book.set_matcher(uid, Script([1, 2]))
    assert book.advance() == 3
    settle(book)
    assert len(book.pop_masks(99).uids) == 30


def test_masks_are_made_of_somebody_or_not_at_all():
    """What makes several at once fails for none."""

    def fill(matchers, out):
        assert matchers
        return fill_sequentially(matchers, out)

    book = GrammarBook(WORDS, clock=lambda: 0.0)
    book.fill, book.batch = fill, 16
    book.open(OpenGrammar(0, "{}", -1, np.array((), np.int32), False, 10_000))
    book.set_matcher(0, Script([1], [2]))
    book.open(opened(1, tokens=[1] * 2000))
    book.set_matcher(1, Script(*[[1]] * 2001))
    settle(book)
    assert book.pop_masks(9).uids.tolist() == [1]


def test_no_more_is_forced_than_is_wanted():
    book = forced(1, end=13)
    settle(book)
    assert book.pop_runs().counts.tolist() == [3]
    assert book.pop_masks(9).positions.tolist() == [13]


def test_what_was_said_before_a_restart_is_taken_over_several_turns():
    book, matcher = GrammarBook(WORDS, clock=lambda: 0.0), Script(*[[1]] * 5001)
    book.open(opened(7, tokens=[1] * 5000))
    book.set_matcher(7, matcher)
    lengths = []
    while book.has_work:
        book.advance()
        lengths.append(len(matcher.taken))
    assert max(np.diff([0, *lengths])) <= 1024
    assert book.pop_masks(9).positions.tolist() == [5010]


def test_an_answer_that_is_over_is_no_more_work():
    book = forced(3)
    book.close(CloseGrammars(np.array([0, 1, 2])))
    assert not book.has_work
    assert book.advance() == 0


def test_what_the_machine_refuses_is_told_as_that():
    book = book_of(Script([1]), OutOfResources("no more threads"), InvalidRequest("nonsense"))
    failed = book.pop_failures()
    assert failed.uids.tolist() == [1, 2]
    assert failed.refused.tolist() == [1]
