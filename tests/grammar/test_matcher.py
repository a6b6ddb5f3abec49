"""A matcher's masks are exactly what the grammar allows next."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from nanoactor.errors import InvalidRequest, ProtocolBug, UnsupportedModel
from nanoactor.grammar import matcher as module
from nanoactor.grammar.vocabulary import Vocabulary
from nanoactor.models.errors import ModelError
from tests.grammar.schemas import object_schema
from tests.grammar.vocabularies import (
    DEMO,
    QWEN_ADDED,
    accepts,
    allowed,
    byte_level,
    byte_tokenizer,
    compiled,
    demo,
    follow,
    ids_of,
    make_vocabulary,
)


@pytest.fixture(params=[byte_level, demo])
def vocabulary(request):
    return request.param()


def after(grammar, ids):
    matcher = grammar.matcher()
    matcher.consume(ids)
    return matcher


def test_a_vocabulary_knows_its_sizes_and_special_tokens():
    qwen, plain = byte_level(), demo()
    assert (qwen.size, qwen.words, qwen.tokens) == (268, 9, 263)
    assert (plain.size, plain.words, plain.tokens) == (2090, 66, 2048)
    assert [qwen.special(text) for text in QWEN_ADDED] == [259, 260, 261, 262]
    assert [plain.special(text) for text in QWEN_ADDED] == [None] * 4
    assert qwen.special("<|im_end|>") == qwen.eos_ids[0] == 258
    assert qwen.special("a") is None


def test_vocabularies_that_cannot_serve(tmp_path):
    with pytest.raises(
        ModelError, match="ids up to 2047, but the model's vocabulary has only 2000"
    ):
        Vocabulary(DEMO, 2000, (2,))
    with pytest.raises(
        UnsupportedModel, match=r"the model's end-of-sequence ids, \[\], are not in"
    ):
        Vocabulary(DEMO, 2048, ())
    with pytest.raises(
        UnsupportedModel, match=r"the model's end-of-sequence ids, \[2, 2050\], are not in"
    ):
        Vocabulary(DEMO, 2090, (2, 2050))
    with pytest.raises(ModelError, match="does not exist"):
        Vocabulary(tmp_path / "tokenizer.json", 2090, (2,))
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(UnsupportedModel, match="that grammars do not support"):
        make_vocabulary(words, eos=("b",))
    gap = Tokenizer(models.BPE({"a": 0, "b": 5}, []))
    gap.decoder = decoders.ByteLevel()
    with pytest.raises(UnsupportedModel, match="have no gaps"):
        make_vocabulary(gap, eos=("b",))


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_masks_are_what_can_be_consumed_one_by_one(seed):
    """Each byte is a token here, so that nothing is left out for being spelt another way."""
    vocabulary, chance = byte_level(), random.Random(seed)
    grammar = compiled(vocabulary, "json_schema", object_schema(chance, 2))
    taken, matcher = [], grammar.matcher()
    for _ in range(12):
        inside = allowed(matcher, vocabulary)
        for token in chance.sample(inside, min(6, len(inside))):
            after(grammar, taken).consume([token])
        outside = sorted(set(range(vocabulary.size + 10)) - set(inside))
        for token in chance.sample(outside, 4):
            with pytest.raises(ProtocolBug, match=f"token {token} is not allowed"):
                after(grammar, taken).consume([token])
        token = chance.choice(inside)
        if token in vocabulary.eos_ids:
            break
        matcher.consume([token])
        taken.append(token)
    assert allowed(after(grammar, taken), vocabulary) == allowed(matcher, vocabulary)


@given(seed=st.integers(0, 10**6))
def test_what_a_mask_allows_can_be_consumed(seed):
    """Also where a token has many bytes, and ends within the next part of the answer."""
    vocabulary, chance = demo(), random.Random(seed)
    grammar = compiled(vocabulary, "json_schema", object_schema(chance, 2), thoughts="open")
    taken, matcher = ids_of(vocabulary, "Hm.</think>"), grammar.matcher()
    matcher.consume(taken)
    for _ in range(30):
        inside = allowed(matcher, vocabulary)
        for token in chance.sample(inside, min(10, len(inside))):
            after(grammar, taken).consume([token])
        token = chance.choice(inside)
        if token in vocabulary.eos_ids:
            break
        matcher.consume([token])
        taken.append(token)


def test_ids_past_the_tokenizers_are_never_allowed(vocabulary):
    everything = compiled(vocabulary, "grammar", "start: <[*]> | /(?s:.*)/").matcher()
    assert max(allowed(everything, vocabulary)) < vocabulary.tokens
    last, padding = vocabulary.tokens - 1, vocabulary.tokens
    one = compiled(vocabulary, "grammar", f"start: <[{last}-{padding}]>").matcher()
    assert allowed(one, vocabulary) == [last]
    with pytest.raises(InvalidRequest, match="no token may follow"):
        compiled(vocabulary, "grammar", f"start: <[{padding}-{padding + 1}]>")


def test_an_answer_that_can_only_end_allows_the_ends_alone(vocabulary):
    ends = sorted(vocabulary.eos_ids)
    assert len(ends) == 2
    grammar = compiled(vocabulary, "choice", ["a", "abc"])
    matcher = grammar.matcher()
    assert not matcher.is_complete
    assert not set(ends) & set(allowed(matcher, vocabulary))
    matcher.consume(ids_of(vocabulary, "a"))
    assert matcher.is_complete
    assert set(ends) < set(allowed(matcher, vocabulary))
    for end in ends:
        ended = after(grammar, ids_of(vocabulary, "a"))
        ended.consume([end])
        assert ended.is_complete
        assert allowed(ended, vocabulary) == ends
        ended.consume(ends)
        with pytest.raises(ProtocolBug):
            ended.consume(ids_of(vocabulary, "b"))
    finished = after(grammar, ids_of(vocabulary, "abc"))
    assert finished.is_complete
    assert allowed(finished, vocabulary) == ends
    with pytest.raises(ProtocolBug):
        finished.consume(ids_of(vocabulary, "d"))


def test_the_end_may_not_come_early(vocabulary):
    for end in vocabulary.eos_ids:
        matcher = compiled(vocabulary, "choice", ["abc"]).matcher()
        matcher.consume(ids_of(vocabulary, "ab"))
        with pytest.raises(ProtocolBug, match=f"token {end} is not allowed"):
            matcher.consume([end])


def test_a_mask_overwrites_all_of_its_row_and_nothing_else(vocabulary):
    rows = np.full((3, vocabulary.words), 0x55555555, np.int32)
    matcher = compiled(vocabulary, "regex", "b").matcher()
    matcher.fill(rows[1])
    (letter,) = ids_of(vocabulary, "b")
    expected = np.zeros(vocabulary.words, np.int32)
    expected[letter // 32] = np.uint32(1 << letter % 32).astype(np.int32)
    assert (rows[1] == expected).all()
    assert (rows[[0, 2]] == 0x55555555).all()


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(8, np.int32),
        np.zeros(10, np.int32),
        np.zeros((1, 9), np.int32),
        np.zeros(18, np.int32)[::2],
    ],
)
def test_a_row_of_another_shape_is_a_bug(out):
    with pytest.raises(ProtocolBug, match="the mask has shape"):
        compiled(byte_level(), "regex", "b").matcher().fill(out)


def test_a_text_without_a_choice_is_the_only_one(vocabulary):
    matcher = compiled(vocabulary, "choice", ["abcdefgh"]).matcher()
    assert follow(matcher, vocabulary) == "abcdefgh"
    assert matcher.is_complete
    matcher = compiled(vocabulary, "regex", "the same(, the| other)").matcher()
    text = follow(matcher, vocabulary)
    assert len(text) > 3
    assert "the same".startswith(text)


def test_matchers_of_a_grammar_are_independent(vocabulary):
    grammar = compiled(vocabulary, "regex", "(a|b)c?")
    first, second = grammar.matcher(), grammar.matcher()
    first.consume(ids_of(vocabulary, "a"))
    assert follow(second, vocabulary) == ""
    second.consume(ids_of(vocabulary, "b"))
    first.consume(ids_of(vocabulary, "c"))
    assert first.is_complete
    assert set(allowed(second, vocabulary)) == {*ids_of(vocabulary, "c"), *vocabulary.eos_ids}
    assert accepts(vocabulary, grammar, "a")


def test_text_that_a_normalizer_would_change_is_forced_as_it_is():
    """Qwen's tokenizers compose characters before they make tokens of them."""
    vocabulary = byte_level()
    assert byte_tokenizer().normalizer is not None
    for text in ("e\u0301xyz", "\u212b"):
        matcher = compiled(vocabulary, "choice", [text]).matcher()
        assert follow(matcher, vocabulary) == text
        assert matcher.is_complete


def test_a_tokenizer_that_would_add_spaces_or_cut_serves_too():
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    vocabulary = make_vocabulary(tokenizer)
    matcher = compiled(vocabulary, "choice", ["ABCDEFGH"]).matcher()
    assert follow(matcher, vocabulary) == "ABCDEFGH"


def test_a_grammar_whose_automaton_is_used_up_begins_anew(monkeypatch):
    """All matchers of a grammar share the automaton, and with it the bound on its states."""
    few = LLParserLimits(max_lexer_states=100, verbose_errors=False)
    monkeypatch.setattr(module, "limits", lambda kind: few)
    vocabulary = byte_level()
    grammar = compiled(vocabulary, "regex", "[ab]{1,500}")
    other = grammar.matcher()
    matcher = grammar.matcher()
    (letter,) = ids_of(vocabulary, "a")
    with pytest.raises(InvalidRequest, match="regex is too complex"):
        for _ in range(200):
            allowed(matcher, vocabulary)
            matcher.consume([letter])
    with pytest.raises(InvalidRequest, match="regex is too complex"):
        allowed(other, vocabulary)
    again = grammar.matcher()
    for _ in range(50):
        assert letter in allowed(again, vocabulary)
        again.consume([letter])
