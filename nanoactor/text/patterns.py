"""Detection of tokenizers that need a bounded amount of time and memory for a text of a given
length.

A `tokenizer.json` may contain regular expressions, which the library matches by backtracking, and
replacements, which may multiply the length of a text. Tokenizers that are known to be bounded run
in the actor's own process, others in a disposable child process (`renderer.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

LONG_TEXT = 64 * 1024
"""Number of characters that take about 20 ms to encode. Longer texts are encoded on a thread."""
_MAX_GROWTH = 64.0
"""Maximum factor by which all normalizers together may lengthen a text."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BOUNDED_PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(
            rf"{_CONTRACTIONS}|{_WORDS}|{numbers}|{_REST}"
            for numbers in (r"\p{N}", r"\p{N}{1,3}", r"\p{N}{1,2}")
        ),
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Regular expressions for splitting a text that scan each run of characters at most twice: those of
GPT-2, Qwen and Llama 3, and one that keeps combining marks with letters."""
_SINGLE_RUN = re.compile(
    r"(\\[swdSWD]|\[[^\[\]]*\]|\\p\{\w+\}|[^\\()\[\]{}|*+?.^$])(\+|\*|\?|\{\d+(,\d*)?\})"
)
_NORMALIZER_GROWTH = {
    "NFC": 3.0,
    "NFD": 4.0,
    "NFKC": 18.0,
    "NFKD": 18.0,
    "Lowercase": 3.0,
    "Strip": 1.0,
    "StripAccents": 1.0,
    "Nmt": 1.0,
    "BertNormalizer": 4.0,
    "ByteLevel": 2.0,
    "Precompiled": 18.0,
    "Prepend": 1.0,
}
"""Maximum factor by which each type of normalizer lengthens a text."""
_SPLITTERS = {
    "ByteLevel",
    "Metaspace",
    "Digits",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
    "BertPreTokenizer",
    "CharDelimiterSplit",
    "UnicodeScripts",
    "FixedLength",
}


def is_bounded(tokenizer: Mapping[str, Any]) -> bool:
    """Return True if the tokenizer's definition (`tokenizer.json`) shows that its time and memory
    are bounded by the length of the text."""
    growth = math.prod(
        _growth(normalizer) for normalizer in _parts(tokenizer.get("normalizer"), "normalizers")
    )
    splitters = _parts(tokenizer.get("pre_tokenizer"), "pretokenizers")
    return growth <= _MAX_GROWTH and all(map(_is_simple_splitter, splitters))


def _parts(step: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield a pipeline step. If it is a sequence, yield the parts listed under its key `name`
    instead, recursively. Yield nothing for None."""
    if step is None:
        return
    if step.get("type") == "Sequence":
        for part in step.get(name, ()):
            yield from _parts(part, name)
    else:
        yield step


def _growth(normalizer: Mapping[str, Any]) -> float:
    if normalizer.get("type") != "Replace":
        return _NORMALIZER_GROWTH.get(str(normalizer.get("type")), math.inf)
    pattern, content = normalizer.get("pattern", {}), str(normalizer.get("content", ""))
    if pattern.get("String"):
        return max(1.0, len(content.encode()) / len(str(pattern["String"]).encode()))
    if _is_simple(str(pattern.get("Regex", "("))):
        return max(1.0, float(len(content.encode())))
    return math.inf


def _is_simple_splitter(splitter: Mapping[str, Any]) -> bool:
    if splitter.get("type") != "Split":
        return splitter.get("type") in _SPLITTERS
    pattern = splitter.get("pattern", {})
    return "String" in pattern or _is_simple(str(pattern.get("Regex", "(")))


def _is_simple(pattern: str) -> bool:
    """Return True if a regular expression cannot backtrack for long: it is in `_BOUNDED_PATTERNS`,
    has no repetition, or repeats a single character class."""
    repeats = bool(set(pattern) & set("*+?{("))
    return pattern in _BOUNDED_PATTERNS or not repeats or bool(_SINGLE_RUN.fullmatch(pattern))
