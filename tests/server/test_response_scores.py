"""Tokens' log-probabilities go to the piece of text that they begin in, however pieces are cut."""

from hypothesis import given
from hypothesis import strategies as st

from nanoactor.server.responses.scores import TokenScores

THOUGHTS, TEXT = "Cold? Cold.", "Cold, ünd 北京."
STREAM = f"<think>\n{THOUGHTS}\n</think>\n\n{TEXT}"


def entries(data, sizes):
    """Tokens of these sizes in bytes, the last of what is left."""
    found, at = [], 0
    for size in [*sizes, len(data)]:
        if piece := data[at : at + size]:
            found.append({"token": str(at), "bytes": list(piece)})
        at += size
    return found


def of_text(tokens):
    """Those that begin within the text."""
    start, at, found = len(STREAM.encode()) - len(TEXT.encode()), 0, []
    for one in tokens:
        if at >= start:
            found.append(one)
        at += len(one["bytes"])
    return found


SIZES = st.lists(st.integers(1, 6), max_size=60)


@given(SIZES, st.integers(0, len(TEXT)))
def test_a_texts_tokens_are_those_that_begin_in_it(sizes, cut):
    tokens = entries(STREAM.encode(), sizes)
    scores = TokenScores()
    scores.push(tokens)
    scores.pop(THOUGHTS)
    pieces = [piece for piece in (TEXT[:cut], TEXT[cut:]) if piece]
    assert [one for piece in pieces for one in scores.pop(piece)] == of_text(tokens)


@given(SIZES)
def test_tokens_may_come_just_before_their_text(sizes):
    scores, found, told, sent = TokenScores(), [], b"", 0
    tokens = entries(TEXT.encode(), sizes)
    for one in tokens:
        scores.push([one])
        told += bytes(one["bytes"])
        text = told.decode(errors="ignore")
        if len(text) > sent:
            found += scores.pop(text[sent:])
            sent = len(text)
    assert found == tokens


def test_tokens_of_a_piece_that_was_not_found_belong_to_no_later_one():
    scores = TokenScores()
    first, half, second = entries(b"a\xe2\x82a", [1, 2])
    scores.push([first, half])
    assert scores.pop("a\ufffd") == []
    scores.push([second])
    assert scores.pop("a") == [second]


def test_a_piece_that_is_not_made_of_tokens_has_none():
    scores = TokenScores()
    scores.push(entries("ü".encode(), [1]))
    assert scores.pop("\ufffd") == []
    assert scores.pop("\ud800") == []
    assert TokenScores().pop("a") == []
