"""Small grammars do not wait for large ones; what fails, fails with a reason."""

import queue
import threading
from types import SimpleNamespace

import pytest

from nanoactor.errors import InvalidRequest
from nanoactor.grammar import compiling
from nanoactor.grammar.compile_threads import CompilerThreads

LARGE = "a" * 20_000


class Compiler:
    """Stands where a `GrammarCompiler` does: a matcher is the length of the grammar."""

    may_go_on = threading.Event()

    def __init__(self, files):
        self.files = files

    def parallel_fill(self, cores):
        return "fill" if self.files.is_parallel else None

    def matcher(self, text):
        if text == LARGE:
            assert self.may_go_on.wait(10)
        if text == "bug":
            raise ValueError("a bug of the parser")
        return len(text)


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setattr(compiling, "GrammarCompiler", Compiler)
    monkeypatch.setattr(Compiler, "may_go_on", threading.Event())
    made = []

    def make(is_parallel=False):
        fills = []
        made.append(CompilerThreads(SimpleNamespace(is_parallel=is_parallel), fills.append))
        return made[-1], fills

    yield make
    Compiler.may_go_on.set()
    for one in made:
        one.close()


def test_a_small_grammar_does_not_wait_for_a_large_one(threads):
    own, _ = threads()
    results = queue.SimpleQueue()
    for text in (LARGE, "small"):
        own.compile(text, lambda: True, results.put)
    assert results.get(timeout=10)[0] == len("small")
    Compiler.may_go_on.set()
    assert results.get(timeout=10)[0] == len(LARGE)


@pytest.mark.parametrize("is_parallel", [False, True])
def test_masks_are_computed_in_parallel_where_the_compiler_can(threads, is_parallel):
    own, fills = threads(is_parallel)
    results = queue.SimpleQueue()
    own.start_reading()
    own.start_reading()
    own.compile("a", lambda: True, results.put)
    results.get(timeout=10)
    assert fills == ["fill"] * is_parallel


def test_what_cannot_be_compiled_has_a_reason(threads):
    own, _ = threads()
    results = queue.SimpleQueue()
    own.compile("a", lambda: False, results.put)
    own.compile("bug", lambda: True, results.put)
    for reason in ("no longer needed", "could not be parsed"):
        error, _ = results.get(timeout=10)
        assert isinstance(error, InvalidRequest)
        assert reason in str(error)


def test_without_a_compiler_every_grammar_is_refused(threads, monkeypatch):
    def fail(files):
        raise OSError("no such\nfile")

    monkeypatch.setattr(compiling, "GrammarCompiler", fail)
    own, _ = threads()
    results = queue.SimpleQueue()
    own.compile("a", lambda: True, results.put)
    error, _ = results.get(timeout=10)
    assert isinstance(error, InvalidRequest)
    assert "does not support structured outputs: no such file" in str(error)
