"""What was compiled last is kept, within bounds; what cannot be compiled is not tried again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.cache import GrammarCache
from tests.grammar.vocabularies import byte_level, compiled, spec


@pytest.fixture(scope="module")
def grammar():
    return compiled(byte_level(), "regex", "a")


def test_a_grammar_is_found_by_its_text(grammar):
    cache = GrammarCache()
    text = spec("regex", "a").to_text()
    assert cache.get(text) is None
    cache.put(text, grammar)
    assert cache.get(text) is grammar
    assert cache.get(spec("regex", "b").to_text()) is None
    assert cache.get(spec("regex", "a", thoughts="open").to_text()) is None


def test_a_refusal_is_found_too():
    cache = GrammarCache()
    cache.put("bad", InvalidRequest("regex: unclosed group"))
    raised = []
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="^regex: unclosed group$") as caught:
            cache.get("bad")
        raised.append(caught.value)
    assert raised[0] is not raised[1]  # each has its own traceback


def test_what_was_used_longest_ago_goes_first(grammar):
    cache = GrammarCache(max_count=2)
    cache.put("a", grammar)
    cache.put("b", grammar)
    cache.get("a")
    cache.put("c", InvalidRequest("no"))
    assert cache.get("b") is None
    assert cache.get("a") is grammar
    cache.put("c", grammar)  # known: nothing has to go
    assert cache.get("a") is cache.get("c") is grammar


def test_a_text_larger_than_the_bound_is_not_kept(grammar):
    cache = GrammarCache(max_bytes=10)
    cache.put("é" * 5, grammar)
    assert cache.get("é" * 5) is grammar
    cache.put("é" * 6, grammar)
    assert cache.count == 0
    cache.put("a", grammar)
    assert cache.get("a") is grammar


@given(texts=st.lists(st.text("ab", max_size=6), max_size=40))
def test_the_bounds_hold(grammar, texts):
    cache = GrammarCache(max_count=4, max_bytes=12)
    for text in texts:
        cache.put(text, grammar)
        kept = [one for one in set(texts) if cache.get(one) is not None]
        assert cache.count == len(kept) <= 4
        assert sum(map(len, kept)) <= 12
        assert text in kept


def test_grammars_that_take_much_memory_push_others_out():
    cache = GrammarCache(max_bytes=1000)
    for name, size in (("small", 10), ("large", 900), ("larger", 950)):
        cache.put(name, InvalidRequest(name), size)
    assert cache.count == 1
    with pytest.raises(InvalidRequest, match="larger"):
        cache.get("larger")
    cache.put("huge", InvalidRequest("huge"), 1001)
    assert cache.count == 0
