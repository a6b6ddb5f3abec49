"""The pieces add up to what decoding everything at once gives, for every kind of tokenizer."""

import codecs
import functools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from nanoactor.text.decoding import DecoderFactory, byte_alphabet
from tests.text.tokenizers_for_tests import (
    BYTE_LEVEL,
    EVERY,
    OTHERS,
    PLAIN_ADDED,
    SPECIALS,
    TEXTS,
    byte_level,
    llama_like,
    single_bytes,
)

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
SKIP = pytest.mark.parametrize("skip", [False, True], ids=["keep", "skip"])
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@functools.cache
def factory(name):
    return DecoderFactory(EVERY[name]())


def pieces(decoders, ids, skip):
    decoder = decoders.new(skip)
    return [*map(decoder.push, ids), decoder.finish()]


class Watched:
    """A tokenizer that notes how many tokens each call of `decode` was given."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.lengths = []

    def decode(self, ids, **kwargs):
        self.lengths.append(len(ids))
        return self.tokenizer.decode(ids, **kwargs)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@SKIP
@pytest.mark.parametrize("name", EVERY)
def test_pieces_of_real_text_add_up(name, skip):
    tokenizer = EVERY[name]()
    specials = "".join(t.content for t in tokenizer.get_added_tokens_decoder().values())
    for text in (*TEXTS, " ".join(TEXTS), specials.join(TEXTS)):
        ids = tokenizer.encode(text).ids
        assert "".join(pieces(factory(name), ids, skip)) == tokenizer.decode(
            ids, skip_special_tokens=skip
        )


@SKIP
@pytest.mark.parametrize("name", EVERY)
def test_pieces_of_any_ids_add_up(name, skip):
    tokenizer = EVERY[name]()
    vocabulary = tokenizer.get_vocab()
    beyond = 20 if name in BYTE_LEVEL else 0
    # Half of the ids are special, added, or single bytes of every class that UTF-8 knows.
    tokens = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    for byte in (0x41, 0x80, 0xA0, 0xBF, 0xC2, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0xFF):
        tokens += [letters[byte], f"<0x{byte:02X}>"]
    telling = [vocabulary[token] for token in tokens if token in vocabulary]
    any_id = st.integers(0, max(vocabulary.values()) + beyond)

    @settings(max_examples=100, deadline=None, phases=PHASES)
    @given(st.lists(st.one_of(any_id, st.sampled_from(telling)), max_size=12))
    def check(ids):
        assert "".join(pieces(factory(name), ids, skip)) == tokenizer.decode(
            ids, skip_special_tokens=skip
        )

    check()


@pytest.mark.parametrize("name", OTHERS)
def test_ids_that_no_token_has_do_not_change_the_text_around_them(name):
    # A model's vocabulary is often padded beyond the tokenizer's, and such ids can be sampled.
    tokenizer = OTHERS[name]()
    unknown = max(tokenizer.get_vocab().values()) + 7
    ids = tokenizer.encode("to be or not", add_special_tokens=False).ids
    for at in range(len(ids) + 1):
        mixed = [*ids[:at], unknown, *ids[at:]]
        assert "".join(pieces(factory(name), mixed, False)) == tokenizer.decode(mixed)


@pytest.mark.parametrize("name", EVERY)
def test_no_piece_replaces_a_character_that_later_completes(name):
    tokenizer = EVERY[name]()
    for text in TEXTS:
        ids = tokenizer.encode(text.replace(REPLACEMENT, "")).ids
        assert not any(REPLACEMENT in piece for piece in pieces(factory(name), ids, False))


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_a_character_comes_with_the_token_that_completes_it(name):
    tokenizer = BYTE_LEVEL[name]()
    alphabet = byte_alphabet()
    for text in TEXTS:
        encoding = tokenizer.encode(text)
        raw, out = b"", ""
        for token, piece in zip(
            encoding.tokens, pieces(factory(name), encoding.ids, True), strict=False
        ):
            raw += bytes(alphabet[letter] for letter in token)
            out += piece
            assert out == codecs.getincrementaldecoder("utf-8")().decode(raw)


def test_incomplete_characters_become_replacements_as_decoding_at_once_makes_them():
    tokenizer = single_bytes()
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    for raw in (b"\xe4\xbd", b"a\xf0\x9f\x91", b"\xf0\x9fb", b"\xed\xa0\x80", b"\xc0\xaf\xe4"):
        ids = [tokenizer.token_to_id(letters[byte]) for byte in raw]
        parts = pieces(factory("single_bytes"), ids, True)
        assert "".join(parts) == raw.decode(errors="replace") == tokenizer.decode(ids)


def test_byte_level_decoding_never_asks_the_tokenizer():
    watched = Watched(byte_level())
    decoders = DecoderFactory(watched)
    ids = byte_level().encode(" ".join(TEXTS) * 20).ids
    assert "".join(pieces(decoders, ids, True)) == byte_level().decode(ids)
    assert watched.lengths == []


@pytest.mark.parametrize("name", OTHERS)
def test_other_decoding_costs_the_same_however_long_the_text(name):
    watched = Watched(OTHERS[name]())
    ids = watched.encode(" to be or not to be" * 200).ids
    pieces(DecoderFactory(watched), ids, True)
    assert len(watched.lengths) <= 2 * len(ids) + 2
    assert max(watched.lengths) <= 4


def test_special_tokens_are_left_out_or_kept_and_plain_added_ones_are_always_kept():
    tokenizer = byte_level()
    ids = tokenizer.encode(f"a{SPECIALS[2]}{PLAIN_ADDED}{SPECIALS[1]}b").ids
    assert len(ids) == 5
    assert pieces(factory("byte_level"), ids, True) == ["a", "", PLAIN_ADDED, "", "b", ""]
    kept = ["a", SPECIALS[2], PLAIN_ADDED, SPECIALS[1], "b", ""]
    assert pieces(factory("byte_level"), ids, False) == kept


def test_a_special_token_does_not_separate_the_bytes_of_a_character_unless_it_is_kept():
    tokenizer = single_bytes()
    first, second = tokenizer.encode("é").ids
    ids = [first, tokenizer.token_to_id(SPECIALS[0]), second]
    assert "".join(pieces(factory("single_bytes"), ids, True)) == "é"
    kept = "".join(pieces(factory("single_bytes"), ids, False))
    assert kept == f"{REPLACEMENT}{SPECIALS[0]}{REPLACEMENT}"


def test_decoders_of_different_requests_share_nothing():
    for name, text in (("single_bytes", "é和"), ("llama_like", "a 和 b")):
        ids = EVERY[name]().encode(text).ids
        one, other = factory(name).new(True), factory(name).new(True)
        out = [(one.push(token), other.push(token)) for token in ids]
        out.append((one.finish(), other.finish()))
        assert "".join(a for a, _ in out) == "".join(b for _, b in out)
        assert "".join(a for a, _ in out) == EVERY[name]().decode(ids)


def test_the_byte_alphabet_is_that_of_the_tokenizers_library():
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    # Which letter is which byte: as the library writes every character below U+0800.
    written = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "".join(map(chr, range(0x800)))
    ((letters, _),) = written.pre_tokenize_str(text)
    assert bytes(alphabet[letter] for letter in letters) == text.encode()


def test_the_tokenizers_tested_here_split_characters_over_tokens():
    for tokenizer in (byte_level(), single_bytes(), llama_like()):
        ids = tokenizer.encode(" ".join(TEXTS)).ids
        alone = [tokenizer.decode([token]) for token in ids]
        assert sum(REPLACEMENT in text for text in alone) > 20
