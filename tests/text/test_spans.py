"""The place of a prompt's tokens in its text, for every kind of tokenizer."""

import pytest
from tokenizers import Tokenizer, normalizers, processors

from nanoactor.text.decoding import DecoderFactory
from nanoactor.text.spans import SpanFinder
from tests.text.tokenizers_for_tests import EVERY, TEXTS, byte_level

ASCII = "Hello there, my friend: what's this?"


def copy_of(tokenizer):
    return Tokenizer.from_str(tokenizer.to_str())


@pytest.mark.parametrize("text", TEXTS)
def test_a_token_begins_in_the_character_that_it_is_part_of(text):
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    finder, piece = SpanFinder(tokenizer), DecoderFactory(tokenizer).piece
    for first, starts in (finder.of_text(text), finder.of_ids(ids)):
        assert first == piece(ids[0])
        begin = 0
        for token, start in zip(ids, starts, strict=True):
            assert len(text[:start].encode()) <= begin < len(text[: start + 1].encode())
            begin += len(piece(token))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("text", TEXTS)
def test_starts_ascend_within_the_text(name, text):
    tokenizer = EVERY[name]()
    ids = tokenizer.encode(text).ids
    finder = SpanFinder(tokenizer)
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    for (_, starts), whole in ((finder.of_text(text), text), (finder.of_ids(ids), decoded)):
        assert starts[0] == 0
        assert starts == sorted(starts)
        assert len(starts) == len(ids)
        assert starts[-1] <= len(whole)


@pytest.mark.parametrize("name", EVERY)
def test_words_are_found_where_they_stand(name):
    tokenizer = EVERY[name]()
    ids = tokenizer.encode(ASCII).ids
    piece = DecoderFactory(tokenizer).piece
    _, starts = SpanFinder(tokenizer).of_text(ASCII)
    for token, start in zip(ids, starts, strict=True):
        word = piece(token).decode(errors="replace").strip()
        if word.isascii() and word.isalpha():
            assert ASCII[start:].lstrip().startswith(word), (word, start)


def test_a_token_that_stands_for_the_beginning_has_no_place():
    tokenizer = copy_of(byte_level())
    bos = "<|endoftext|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    first, starts = SpanFinder(tokenizer).of_text(ASCII)
    plain = SpanFinder(byte_level()).of_text(ASCII)[1]
    assert first == bos.encode()
    assert starts == [0, *plain]
    # Of ids the text has it.
    _, starts = SpanFinder(tokenizer).of_ids(tokenizer.encode(ASCII).ids)
    assert starts == [0, *(len(bos) + start for start in plain)]


def test_a_text_that_is_normalized_keeps_its_own_places():
    tokenizer = copy_of(byte_level())
    tokenizer.normalizer = normalizers.NFC()
    text = "cafe\u0301 cafe\u0301: the question"
    ids = tokenizer.encode(text).ids
    piece = DecoderFactory(tokenizer).piece
    _, starts = SpanFinder(tokenizer).of_text(text)
    assert tokenizer.decode(ids) != text
    for token, start in zip(ids, starts, strict=True):
        word = piece(token).decode(errors="replace")
        if word.isascii():
            assert text[start:].startswith(word), (word, start)
