"""Log-probabilities through the detokenizer: each with its token, whatever a delta may hold."""

import numpy as np
import pytest

from nanoactor.messages.engine import Open, TextOptions, Tokens
from nanoactor.messages.scores import RequestScores, TokenScores
from nanoactor.text.decoding import DecoderFactory
from nanoactor.text.detokenizer import Detokenizer
from nanoactor.text.scores import reported_runs
from tests.text.test_detokenizer import array, finish
from tests.text.tokenizers_for_tests import EVERY, byte_level

TEXT = "naïve 日本 🙂 café, naïve"


def scores_of(runs, count):
    """The message of runs (uid, is_prompt, tokens): what is said depends on the token alone."""
    tokens = [token for _, _, several in runs for token in several]
    tops = [token + rank + 1 for token in tokens for rank in range(count)]
    return RequestScores(
        array((uid for uid, _, _ in runs), np.int64),
        array((prompt for _, prompt, _ in runs), np.bool_),
        array(len(several) for _, _, several in runs),
        TokenScores(
            array((-token / 8 for token in tokens), np.float32),
            array(token + 1 for token in tokens),
            array([count] * len(tokens)),
            array(tops),
            array((-token / 4 for token in tops), np.float32),
        ),
    )


class Reader:
    """The frontend's end."""

    def __init__(self, logic):
        self.logic = logic
        self.ids, self.own, self.prompt, self.text, self.terminals = {}, {}, {}, {}, {}

    def read(self, budget):
        while (delta := self.logic.pop_delta(budget)) is not None:
            at, runs = 0, [*reported_runs(delta.scores)] if delta.scores else []
            for run in runs:
                assert run.uid not in self.terminals
                into = self.prompt if run.is_prompt else self.own
                pairs = zip(run.logprobs, run.offsets, strict=True)
                into.setdefault(run.uid, []).extend((own, top, at) for (own, top), at in pairs)
            for uid, text, count in zip(
                delta.uids.tolist(), delta.texts, delta.counts.tolist(), strict=True
            ):
                self.text[uid] = self.text.get(uid, "") + text
                self.ids.setdefault(uid, []).extend(delta.token_ids[at : at + count].tolist())
                at += count
                # A score is never later than its token, nor earlier.
                assert len(self.own.get(uid, [])) in (0, len(self.ids[uid]))
            self.terminals |= {terminal.uid: terminal for terminal in delta.terminals}


def opened(logic, uid, prompt):
    options = TextOptions((), False, True, 0)
    logic.open(Open(uid, array(prompt), len(prompt), options))


@pytest.mark.parametrize("budget", [1, 60, 200, 1 << 20])
@pytest.mark.parametrize("count", [0, 3])
def test_each_token_comes_with_its_own(budget, count):
    tokenizer = byte_level()
    factory = DecoderFactory(tokenizer)
    logic, ids = Detokenizer(factory), tokenizer.encode(TEXT).ids
    prompt = ids[::-1]
    reader = Reader(logic)
    opened(logic, 1, prompt)
    opened(logic, 2, [5])
    for index, token in enumerate(ids):
        runs = [(1, False, [token])]
        if index < 3:  # the prompt's come in parts, before and with the first tokens
            runs = [(1, True, prompt[1 + 2 * index : 3 + 2 * index]), *runs]
        ends = (finish(1), finish(2)) if index == len(ids) - 1 else ()
        columns = array([2, 1], np.int64), array([index, index]), array([token, token])
        logic.process(Tokens(index + 1, *columns, ends, scores_of(runs, count)))
        if index % 2:
            reader.read(budget)
    reader.read(budget)
    assert logic.pending == logic.entries == 0
    assert reader.text == {1: TEXT, 2: TEXT}
    assert reader.own.keys() == reader.prompt.keys() == {1}
    assert [(own.logprob, own.rank) for own, _, _ in reader.own[1]] == [
        (-token / 8, token + 1) for token in ids
    ]
    assert [own.rank for own, _, _ in reader.prompt[1]] == [token + 1 for token in prompt[1:7]]
    begin = 0
    for (own, top, at), token in zip(reader.own[1], ids, strict=True):
        assert own.bytes == factory.piece(token)
        assert [*top] == [token + rank + 1 for rank in range(count)]
        assert all(one.bytes == factory.piece(other) for other, one in top.items())
        # It begins in the character that it is said to begin at.
        assert len(TEXT[:at].encode()) <= begin < len(TEXT[: at + 1].encode())
        begin += len(own.bytes)


@pytest.mark.parametrize("name", EVERY)
def test_pieces_of_a_text_are_its_bytes(name):
    tokenizer = EVERY[name]()
    factory = DecoderFactory(tokenizer)
    text = "the cat sat"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = b"".join(map(factory.piece, ids))
    decoded = tokenizer.decode(ids).encode()
    assert pieces.strip() == decoded.strip()


def test_without_a_tokenizer_there_are_no_pieces():
    logic = Detokenizer(None)
    reader = Reader(logic)
    opened(logic, 1, [4, 5])
    runs = [(1, True, [5]), (1, False, [9])]
    columns = array([1], np.int64), array([0]), array([9])
    logic.process(Tokens(1, *columns, (finish(1),), scores_of(runs, 2)))
    reader.read(1 << 20)
    ((own, top, _),) = reader.own[1]
    assert (own.decoded_token, own.bytes, own.rank) == (None, None, 10)
    assert [one.bytes for one in top.values()] == [None, None]


def test_what_comes_for_a_request_that_is_over_is_dropped():
    logic = Detokenizer(None)
    reader = Reader(logic)
    opened(logic, 1, [4, 5])
    none = array([], np.int64), array([]), array([])
    logic.process(Tokens(1, *none, (finish(1),)))
    logic.process(Tokens(2, *none, (), scores_of([(1, True, [5])], 1)))
    reader.read(1 << 20)
    assert reader.prompt == {}
    assert logic.pending == 0
