"""Beam search as plain logic: the sequences of a plain reading of its definition, and of a search
through everything where the beams are wide enough for that."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor import BeamSearchParams
from nanoactor.beams.search import BeamSearch, beam_score, candidates_per_beam
from nanoactor.errors import InvalidRequest
from nanoactor.requests.outputs import Logprob


class Model:
    """Log-probabilities of a small vocabulary behind each sequence, the same each time."""

    def __init__(self, seed, vocabulary, coarse):
        self._seed, self._vocabulary, self._coarse = seed, vocabulary, coarse

    def next(self, tokens):
        """By token id. Coarse ones are often equal, and exact in every sum."""
        drawn = random.Random(f"{self._seed} {tokens}")
        if self._coarse:
            return {t: -drawn.randint(0, 4) / 4 for t in range(self._vocabulary)}
        return {t: -drawn.expovariate(1.0) for t in range(self._vocabulary)}


def searched(model, prompt, params, eos, extra=0):
    """(sequences, steps) of the class under test."""
    search = BeamSearch(prompt, params, eos)
    count, steps = candidates_per_beam(params, eos) + extra, 0
    while not search.is_over:
        assert 1 <= len(search.live) <= params.beam_width
        told = []
        for beam in search.live:
            following = sorted(model.next(beam.tokens).items(), key=lambda item: -item[1])
            told.append({token: Logprob(value) for token, value in following[:count]})
        search.advance(told)
        steps += 1
    found = search.result().sequences
    assert all(beam.text is None for beam in found)
    return found, steps


def by_definition(model, prompt, params, eos):
    """The same without a thought for cost: all steps are taken, and nothing is forgotten."""
    eos = set() if params.ignore_eos else set(eos)
    count = candidates_per_beam(params, eos)
    live, ended = [(list(prompt), 0.0)], []
    for _ in range(params.max_tokens):
        grown = []
        for tokens, total in live:
            following = sorted(model.next(tokens).items(), key=lambda item: (-item[1], item[0]))
            for token, value in following[:count]:
                to = ended if token in eos else grown
                to.append(([*tokens, token], total + value))
        live = sorted(grown, key=lambda beam: -beam[1])[: params.beam_width]

    def score(beam, stopped):
        tokens, total = beam
        return total / (len(tokens) - stopped) ** params.length_penalty

    everything = [(score(beam, True), "stop", beam) for beam in ended]
    everything += [(score(beam, False), "length", beam) for beam in live]
    everything.sort(key=lambda item: -item[0])
    return [
        (tokens, total, reason) for _, reason, (tokens, total) in everything[: params.beam_width]
    ]


PENALTIES = [-1.0, 0.0, 0.5, 1.0, 2.0]


@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(2, 9),
    coarse=st.booleans(),
    width=st.integers(1, 5),
    tokens=st.integers(1, 6),
    eos=st.lists(st.integers(0, 8), max_size=3),
    prompt=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    penalty=st.sampled_from(PENALTIES),
    ignore=st.booleans(),
)
def test_sequences_are_those_of_the_definition(
    seed, vocabulary, coarse, width, tokens, eos, prompt, penalty, ignore
):
    model = Model(seed, vocabulary, coarse)
    params = BeamSearchParams(width, tokens, ignore_eos=ignore, length_penalty=penalty)
    found, steps = searched(model, prompt, params, eos)
    assert [(b.tokens, b.cum_logprob, b.finish_reason) for b in found] == by_definition(
        model, prompt, params, eos
    )
    assert steps <= tokens
    for beam in found:
        output = beam.tokens[len(prompt) :]
        assert beam.tokens[: len(prompt)] == prompt
        assert len(beam.logprobs) == len(output)
        told = [by_id[token].logprob for by_id, token in zip(beam.logprobs, output, strict=True)]
        assert sum(told) == pytest.approx(beam.cum_logprob)
        stopped = not ignore and output[-1] in eos
        assert beam.finish_reason == ("stop" if stopped else "length")
        assert beam.stop_reason == (output[-1] if stopped else None)
        assert stopped or len(output) == tokens


@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(2, 4),
    tokens=st.integers(1, 4),
    eos=st.sampled_from([(), (0,), (0, 1)]),
    penalty=st.sampled_from(PENALTIES),
)
def test_a_beam_as_wide_as_everything_finds_the_best_of_everything(
    seed, vocabulary, tokens, eos, penalty
):
    model, prompt = Model(seed, vocabulary, coarse=False), [1]
    params = BeamSearchParams(vocabulary**tokens, tokens, length_penalty=penalty)
    scores = []
    for length in range(1, tokens + 1):
        for output in itertools.product(range(vocabulary), repeat=length):
            stops = output[-1] in eos
            if any(token in eos for token in output[:-1]) or not (stops or length == tokens):
                continue
            total = sum(
                model.next([*prompt, *output[:at]])[token] for at, token in enumerate(output)
            )
            scores.append((beam_score(total, 1 + length - stops, penalty), output))
    scores.sort(reverse=True)
    found, _ = searched(model, prompt, params, eos)
    assert [tuple(b.tokens[1:]) for b in found] == [output for _, output in scores]


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([(), (3,), (3, 4)]))
def test_what_is_told_beyond_the_candidates_changes_nothing(seed, width, eos):
    model, params = Model(seed, 20, coarse=False), BeamSearchParams(width, 5)
    found, more = (searched(model, [7], params, eos, extra)[0] for extra in (0, 3))
    assert [(b.tokens, b.cum_logprob) for b in found] == [(b.tokens, b.cum_logprob) for b in more]


class Ending:
    """An almost certain end behind each beam; all that goes on is unlikely."""

    def next(self, tokens):
        return {0: -0.01, 1: -5.0, 2: -6.0, 3: -7.0}


# At 3 a sum of -5 a step may still win by its length, until -5 * 138 / 410 ** 3 < -0.01 / 10 ** 3.
@pytest.mark.parametrize(("penalty", "steps"), [(-1.0, 1), (0.0, 1), (1.0, 1), (3.0, 138)])
def test_it_ends_once_nothing_can_be_better(penalty, steps):
    params = BeamSearchParams(1, 400, length_penalty=penalty)
    (found,), taken = searched(Ending(), [1] * 10, params, [0])
    assert taken == steps
    assert (found.tokens, found.cum_logprob, found.finish_reason) == by_definition(
        Ending(), [1] * 10, params, [0]
    )[0]


def test_as_many_candidates_as_leave_the_width_without_ends():
    assert candidates_per_beam(BeamSearchParams(4, 1), [7]) == 8
    assert candidates_per_beam(BeamSearchParams(1, 1), [7]) == 2
    assert candidates_per_beam(BeamSearchParams(1, 1), [7, 8, 9]) == 4
    assert candidates_per_beam(BeamSearchParams(1, 1, ignore_eos=True), [7, 8, 9]) == 2


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (dict(beam_width=0), "beam_width must be from 1"),
        (dict(beam_width=2.5), "beam_width must be an integer"),
        (dict(beam_width=None), "beam_width"),
        (dict(max_tokens=0), "max_tokens must be from 1"),
        (dict(max_tokens=None), "max_tokens"),
        (dict(ignore_eos=1), "ignore_eos must be true or false"),
        (dict(include_stop_str_in_output="no"), "include_stop_str_in_output"),
        (dict(temperature=0.7), "temperature must be 0 for beam search, .*got 0.7"),
        (dict(temperature=None), "temperature"),
        (dict(length_penalty=11), "length_penalty must be a number in"),
        (dict(length_penalty=float("nan")), "length_penalty"),
        (dict(length_penalty=None), "length_penalty"),
        (
            dict(structured_outputs={"regex": "a"}),
            "structured_outputs must be None, because beam search",
        ),
    ],
)
def test_parameters_that_cannot_be_are_named(wrong, named):
    with pytest.raises(InvalidRequest, match=named):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong})


def test_parameters_have_the_order_of_vllm():
    params = BeamSearchParams(4, 32, True, 0.0, 0.6, True)
    assert params.ignore_eos
    assert params.include_stop_str_in_output
    assert params.length_penalty == 0.6
