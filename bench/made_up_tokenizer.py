"""A tokenizer as large as a real model's, made here: words in their spellings, spaces, punctuation
as code and JSON have it, and characters of other scripts, over single bytes."""

from __future__ import annotations

import itertools
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanoactor.model_files.files import DEMO, resolve_model

SPECIAL = 290
"""Ids of the model behind the tokenizer's last, as in Qwen3."""


def write_tokenizer(directory: Path, size: int) -> int:
    """Write a byte-level `tokenizer.json` of so many ids; return the one that ends an answer."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    pieces = _pieces()
    while len(vocabulary) < size - len(marks):
        vocabulary.setdefault(spell.pre_tokenize_str(next(pieces))[0][0], len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = spell
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    assert tokenizer.get_vocab_size() == size
    tokenizer.save(str(directory / "tokenizer.json"))
    return size - 1


def _pieces() -> Iterator[str]:
    """The commonest first."""
    yield from (" " * count for count in range(2, 65))
    yield from ("\n" * lines + " " * count for lines in range(1, 4) for count in range(33))
    signs = "\"'{}[](),:;.<>/\\=+-*_!?#$%&|~^`@"
    for length in (2, 3):
        for sign in itertools.product(signs[:14], repeat=length):
            yield "".join(sign)
            if length == 2:
                yield " " + "".join(sign)
                yield "".join(sign) + "\n"
    text = lzma.decompress((resolve_model(DEMO) / "tinyshakespeare.txt.xz").read_bytes()).decode()
    words = sorted(set(re.findall("[A-Za-z]{2,}", text)))
    for word in words:
        yield from (" " + word, word)
    for word in words:
        lower = word.lower()
        for spelling in (lower, word.capitalize(), word.upper()):
            yield from (" " + spelling, spelling)
    rng = random.Random(0)
    while True:
        kind = rng.random()
        if kind < 0.25:
            yield "".join(chr(rng.randrange(0x4E00, 0x9FA0)) for _ in range(rng.randint(1, 3)))
        elif kind < 0.4:
            yield "".join(chr(rng.randrange(0x430, 0x450)) for _ in range(rng.randint(2, 6)))
        else:
            tail = words[rng.randrange(len(words))][-rng.randint(2, 5) :]
            head = words[rng.randrange(len(words))][: rng.randint(2, 5)]
            yield (" " if rng.random() < 0.5 else "") + head + tail
