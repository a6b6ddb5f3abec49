"""Vocabularies for grammars, and ways to walk through an answer with them."""

import functools
import json
import random
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import nanoactor
from nanoactor.grammar.matcher import CompiledGrammar, Matcher
from nanoactor.grammar.vocabulary import Vocabulary
from nanoactor.requests.grammar_spec import GrammarSpec

DEMO = Path(nanoactor.__file__).parent / "models" / "demo" / "tokenizer.json"
QWEN_ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@functools.cache
def demo() -> Vocabulary:
    """The demo model's: 2048 ids, in whose text tags are plain; the model knows some more."""
    return Vocabulary(DEMO, 2090, (2, 0))


@functools.cache
def byte_level() -> Vocabulary:
    """A token for each byte, Qwen3's special tokens, and its normalizer."""
    return make_vocabulary(byte_tokenizer())


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: id_ for id_, text in enumerate(alphabet)}, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    # Not special, as in Qwen3's own file: a decoder does not leave them out.
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in QWEN_ADDED])
    return tokenizer


def make_vocabulary(tokenizer, more=5, eos=("<|im_end|>", "<|endoftext|>")) -> Vocabulary:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        tokenizer.save(str(path))
        ids = tuple(tokenizer.token_to_id(text) for text in eos)
        return Vocabulary(path, tokenizer.get_vocab_size() + more, ids)


def spec(kind, value="", **options) -> GrammarSpec:
    text = value if isinstance(value, str) else json.dumps(value)
    return GrammarSpec(kind=kind, value=text, **options)


def compiled(vocabulary, kind, value="", **options) -> CompiledGrammar:
    return CompiledGrammar(spec(kind, value, **options), vocabulary)


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    """The ids that may come next."""
    mask = np.full(vocabulary.words, -1, np.int32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def ids_of(vocabulary: Vocabulary, text: str) -> list[int]:
    """The ids of a text, tags as special tokens where the vocabulary has them."""
    return vocabulary.table.tokenize_str(text, parse_special=True)


def follow(matcher: Matcher, vocabulary: Vocabulary) -> str:
    """Go on as long as one id alone is allowed; the text of those."""
    ids: list[int] = []
    while len(inside := allowed(matcher, vocabulary)) == 1 and inside[0] not in vocabulary.eos_ids:
        matcher.consume(inside)
        ids += inside
    return vocabulary.table.decode_bytes(ids).decode()


def accepts(vocabulary: Vocabulary, grammar: CompiledGrammar, text: str) -> bool:
    """Whether a text is an answer, by the masks on its way."""
    matcher = grammar.matcher()
    for token in ids_of(vocabulary, text):
        if token not in allowed(matcher, vocabulary):
            return False
        matcher.consume([token])
    ends = bool(set(vocabulary.eos_ids) & set(allowed(matcher, vocabulary)))
    assert matcher.is_complete == ends
    return ends


def sample(
    vocabulary: Vocabulary, grammar: CompiledGrammar, seed: int | str, limit: int = 2000
) -> str | None:
    """An answer of ids drawn uniformly from those allowed; None where `limit` ids are no answer."""
    chance, matcher = random.Random(seed), grammar.matcher()
    ids: list[int] = []
    while len(ids) < limit:
        token = chance.choice(allowed(matcher, vocabulary))
        if token in vocabulary.eos_ids:
            return vocabulary.table.decode_bytes(ids).decode()
        matcher.consume([token])
        ids.append(token)
    return None
