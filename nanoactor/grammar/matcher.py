"""Compiled grammars, and matchers, which follow a sequence through its grammar and compute the mask
of allowed next tokens."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits
from numpy.typing import NDArray

from nanoactor.errors import InvalidRequest, ProtocolBug, out_of_resources
from nanoactor.grammar.book import MatcherError, fill_sequentially
from nanoactor.grammar.compiler import compile_grammar
from nanoactor.grammar.jsonschema import check_literal, shorten
from nanoactor.grammar.vocabulary import Vocabulary
from nanoactor.requests.grammar_spec import GrammarSpec, Kind
from nanoactor.runtime.native import NativePanic, native_calls

_STACK_BYTES = 512 * 2**20  # of address space; memory is allocated as it is used
_STACK_SIZE_LOCK = threading.Lock()
"""Guards the stack size of new threads, which is a global setting."""
_MAX_ROW_ITEMS_JSON = 2000
_MAX_ROW_ITEMS_GRAMMAR = 500


def limits(kind: Kind) -> LLParserLimits:
    """Return the parser's limits for a kind of grammar, which apply to compilation and to each
    token.

    User-supplied grammars may be ambiguous, so that a token takes time up to the cube of the number
    of Earley items (partial matches) at its position. They therefore have a lower limit on items
    than JSON grammars, which are not ambiguous but need four items for each optional property.
    """
    return LLParserLimits(
        max_items_in_row=_MAX_ROW_ITEMS_GRAMMAR if kind == "grammar" else _MAX_ROW_ITEMS_JSON,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class CompiledGrammar:
    """A compiled grammar, which creates a matcher for each sequence."""

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        """Compile a grammar. Raises `InvalidRequest` if it cannot be parsed, is not supported,
        exceeds `limits`, or matches nothing."""
        self._grammar = compile_grammar(spec, vocabulary)
        self._vocabulary = vocabulary
        self._kind = spec.kind
        self._is_exhausted = False
        self._matcher = self._compile()
        # This detects grammars that match nothing; the parser's constructor does not.
        self.matcher().fill(np.empty(vocabulary.words, np.int32))
        check_literal("x" * len(self._matcher.compute_ff_bytes()), spec.kind)

    def matcher(self) -> Matcher:
        """Return a new matcher at the beginning of a sequence."""
        if self._is_exhausted:
            self._matcher = self._compile()
            self._is_exhausted = False
        return Matcher(self, self._matcher.deep_copy())

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary for which the grammar was compiled."""
        return self._vocabulary

    @property
    def kind(self) -> Kind:
        """The kind of the specification, such as "json_schema"."""
        return self._kind

    def mark_exhausted(self) -> None:
        """Make the next call of `matcher` compile the grammar again. Call this when a sequence has
        used up the states of the current automaton, which all matchers share."""
        self._is_exhausted = True

    def _compile(self) -> LLMatcher:
        matchers: list[LLMatcher] = []

        def compile_here() -> None:
            matchers.append(
                LLMatcher(
                    self._vocabulary.table, self._grammar, log_level=0, limits=limits(self._kind)
                )
            )

        _on_deep_stack(compile_here)
        (matcher,) = matchers
        if matcher.is_error():
            raise InvalidRequest(_error_text(self._kind, matcher.get_error()))
        return matcher


class Matcher:
    """The parser state of one sequence under its grammar. The parts of the automaton that have been
    computed so far are shared with all other matchers of the grammar."""

    def __init__(self, compiled: CompiledGrammar, matcher: LLMatcher) -> None:
        self._compiled = compiled
        self._vocabulary = compiled.vocabulary
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """True if the sequence may end here."""
        return self._matcher.is_accepting()

    def consume(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence. Once the sequence has ended, end-of-sequence tokens have
        no effect.

        Raises `ProtocolBug` for a token that the grammar does not allow, and `InvalidRequest` if
        the parser reaches its limits. After either error, the matcher must not be used any more.
        """
        with _convert_errors():
            for token in tokens:
                if not self._matcher.consume_token(token):
                    self._raise_error(f"token {token}")

    def fill(self, out: NDArray[np.int32]) -> None:
        """Write the mask of the next token to `out`: bit t % 32 of word t // 32 is set if token id
        t is allowed. If the sequence must end here, only the end-of-sequence ids are allowed.

        `out` is contiguous, int32 (words,). Raises `InvalidRequest` if the parser reaches its
        limits or if no token is allowed.
        """
        if out.shape != (self._vocabulary.words,) or not out.flags.c_contiguous:
            raise ProtocolBug(f"the mask has shape {out.shape}, not {(self._vocabulary.words,)}")
        with _convert_errors():
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
            self._finish_mask(out)

    def _finish_mask(self, out: NDArray[np.int32]) -> None:
        """Check the mask that the parser has written to `out`, and clear the bits beyond the
        tokenizer's ids. Raises the same errors as `fill`."""
        if self._matcher.is_error():
            self._raise_error("the next token")
        tokens = self._vocabulary.tokens
        out[-(-tokens // 32) :] = 0
        if tokens % 32:
            out[tokens // 32] &= (1 << tokens % 32) - 1
        if not out.any():
            raise InvalidRequest(
                f"{self._compiled.kind} leads to a dead end: no token may follow the "
                "answer so far, although the answer is incomplete"
            )

    def _raise_error(self, place: str) -> None:
        kind, reason = self._compiled.kind, self._matcher.get_error()
        if "doesn't satisfy" in reason or "parser stopped" in reason or "out of range" in reason:
            raise ProtocolBug(f"{place} is not allowed by the grammar: {shorten(reason)}")
        if "NoExtension" in reason:
            raise InvalidRequest(
                f"{kind} leads to a dead end: no token may follow the answer so far, although "
                "the answer is incomplete"
            )
        self._compiled.mark_exhausted()
        raise InvalidRequest(_too_complex(kind))


class ParallelFiller:
    """Computes the masks of several sequences in parallel, on threads of the parser library."""

    def __init__(self, threads: int) -> None:
        self._executor = LLExecutor(threads)

    def __call__(
        self, matchers: Sequence[Matcher], out: NDArray[np.int32]
    ) -> list[MatcherError | None]:
        """Write the mask of each sequence's next token to `out`, (sequences, words). Return, for
        each sequence, the error that `Matcher.fill` would raise, or None."""
        rows = [(matcher._matcher, row) for row, matcher in enumerate(matchers)]
        width = out.shape[1] * out.itemsize
        try:
            with native_calls():
                self._executor.unsafe_compute_mask_ptr(rows, out.ctypes.data, width, len(matchers))
        except NativePanic:  # in one of the sequences: find out which
            return fill_sequentially([*matchers], out)
        errors: list[MatcherError | None] = []
        for matcher, row in zip(matchers, out, strict=True):
            try:
                matcher._finish_mask(row)
            except InvalidRequest as error:
                errors.append(error)
            else:
                errors.append(None)
        return errors


@contextlib.contextmanager
def _convert_errors() -> Iterator[None]:
    """Convert panics and memory errors of the parser to `InvalidRequest` and `OutOfResources`."""
    try:
        with native_calls():
            yield
    except NativePanic as error:
        raise InvalidRequest(
            f"the parser failed while it was processing the grammar: {shorten(str(error))}"
        ) from error
    except MemoryError as error:
        raise out_of_resources(error) from error


def _on_deep_stack(work: Callable[[], None]) -> None:
    """Run `work` on a thread with a large stack, and raise its error, if any.

    The parser recurses as deeply as a grammar's rules are chained and uses 16 KB of stack per rule.
    Only the length of the grammar limits that depth. With the usual stack of 8 MB, a chain of 1000
    rules would crash the process.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    with _STACK_SIZE_LOCK:
        previous = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar")
            thread.start()  # raises `RuntimeError` if address space is exhausted
        finally:
            threading.stack_size(previous)
    thread.join()
    for error in raised:
        raise error


_CONTEXT = re.compile(r"\n +\d+ \| |\n<non-verbose/>|; following special tokens")
_LIMIT = re.compile(r"too (many|big|large|complex)|max is|lexer error:|limit|fuel|panic")
_PLACE = re.compile(r"(at )?\d+\(\d+\): ")
_REGEX = re.compile(r".*regex parse error:.*error: (?P<reason>.*)", re.DOTALL)
_SCHEMA = re.compile(r".*failed to compile JSON schema: (?P<reason>.*)", re.DOTALL)
_KEYWORDS = re.compile(r"Unimplemented keys: \[(?P<keywords>.*)\]")


def _error_text(kind: str, reason: str) -> str:
    """Convert an error message of the library to an error message for the user. `kind` is the kind
    of grammar."""
    # The rest of the message is the grammar's text around the error and the parser's state.
    reason = _CONTEXT.split(reason)[0].strip().replace("json-schema:///#", "#")
    if regex := _REGEX.fullmatch(reason):
        reason = f"a regular expression is malformed or not supported: {regex['reason']}"
    elif schema := _SCHEMA.fullmatch(reason):
        reason = _schema_error_text(schema["reason"])
    elif not _PLACE.match(reason) and _LIMIT.search(reason):
        return _too_complex(kind)
    elif kind != "grammar" and (place := _PLACE.match(reason)):
        reason = reason[place.end() :]
    return f"{kind}: {shorten(' '.join(reason.split()), 300)}"


def _schema_error_text(reason: str) -> str:
    if keywords := _KEYWORDS.search(reason):
        names = keywords["keywords"].replace('"', "'")
        return f"the keywords {names} are not supported; leave them out"
    if reason.startswith("oneOf"):
        return "oneOf is supported only where its alternatives are mutually exclusive; use anyOf"
    if reason.startswith("Unknown format"):
        name = shorten(reason.partition(": ")[2], 50)
        return f"the format {name!r} is not supported; leave it out, or use a pattern"
    if reason.startswith("Unsatisfiable schema"):
        return f"no value can match the schema ({reason.partition(': ')[2]})"
    return reason


def _too_complex(kind: str) -> str:
    return (
        f"{kind} is too complex; use fewer alternatives, shorter repetitions, or rules that do "
        "not match the same text in several ways"
    )
