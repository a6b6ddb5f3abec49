"""From a scenario that fails to a small one that fails, and the story of each of its requests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.simulation.scenario import Scenario, draw
from tests.simulation.world import World

Edit = Callable[[Scenario], Scenario]

_CALM = dict(
    wire=False,
    uneven=False,
    delay=0.0,
    slow_chance=0.0,
    capacity=1_000_000,
    tokenizers=1,
    plan_lead="eager",
    depth=1,
    max_depth=0,
    deaths=(),
    chunk_bytes=1 << 16,
    max_num_seqs=2,
    max_waiting_requests=1000,
    max_waiting_tokens=100_000,
)
_PLAIN = dict(aborts=(), stop=(), stop_ids=(), eos_ids=(), min_tokens=0, priority=0, at=0.0)
_PLAIN |= dict(n=1, logprobs=-1, prompt_logprobs=-1)


def failure(scenario: Scenario) -> BaseException | None:
    """What goes wrong in a scenario; None where nothing does."""
    try:
        World(scenario).play()
    except Exception as error:
        return error
    return None


def check(seed: int) -> World:
    """Play a seed. Where it fails, shrink it and raise with everything one needs to know."""
    world = World(draw(seed))
    try:
        world.play()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}\n{report(draw(seed))}") from error
    return world


def report(scenario: Scenario, seconds: float = 30.0) -> str:
    """The smallest failing scenario that was found, its error and its stories."""
    small = shrink(scenario, seconds)
    world, error = World(small, record=True), None
    try:
        world.play()
    except Exception as raised:
        error = raised
    return f"shrunk to {small}\n{error!r}\n{world.oracle.stories}"


def shrink(scenario: Scenario, seconds: float) -> Scenario:
    """Smaller and calmer as long as it fails in the same way: by an error of the same class."""
    kind = type(failure(scenario))
    deadline = time.monotonic() + seconds

    def fails(candidate: Scenario) -> bool:
        return time.monotonic() < deadline and type(failure(candidate)) is kind

    before = None
    while before != scenario:
        before = scenario
        scenario = _fewer(scenario, fails)
        for edit in [*_calmer(), *_plainer(scenario), *_shorter(scenario)]:
            changed = edit(scenario)
            if changed != scenario and fails(changed):
                scenario = changed
    return scenario


def _fewer(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Leave out requests: halves, quarters, ... and single ones."""
    size = max(1, len(scenario.asks) // 2)
    while True:
        at = 0
        while at < len(scenario.asks):
            asks = scenario.asks[:at] + scenario.asks[at + size :]
            candidate = dataclasses.replace(scenario, asks=asks)
            if asks and fails(candidate):
                scenario = candidate
            else:
                at += size
        if size == 1:
            return scenario
        size //= 2


def _calmer() -> Iterator[Edit]:
    for name, value in _CALM.items():
        yield partial(dataclasses.replace, **{name: value})


def _plainer(scenario: Scenario) -> Iterator[Edit]:
    for position in range(len(scenario.asks)):
        for name, value in _PLAIN.items():
            yield partial(_change, position=position, **{name: value})


def _shorter(scenario: Scenario) -> Iterator[Edit]:
    for position, ask in enumerate(scenario.asks):
        if ask.caller is not None:
            for keep in sorted({0, len(ask.caller.rounds) // 2, len(ask.caller.rounds) - 1} - {-1}):
                caller = dataclasses.replace(ask.caller, rounds=ask.caller.rounds[:keep])
                yield partial(_change, position=position, caller=caller)
        for keep in sorted({1, len(ask.prompt) // 2, len(ask.prompt) - 1} - {0}):
            yield partial(_cut, position=position, prompt=keep)
        for tokens in sorted({1, ask.max_tokens // 2, ask.max_tokens - 1} - {0}):
            yield partial(_cut, position=position, tokens=tokens)
        for answers in sorted({2, ask.n // 2, ask.n - 1} - {0}):
            yield partial(_cut, position=position, answers=answers)


def _cut(scenario: Scenario, position: int, **limits: int) -> Scenario:
    """Never longer than it has become meanwhile, or shrinking would not end."""
    ask = scenario.asks[position]
    if "prompt" in limits:
        return _change(scenario, position, prompt=ask.prompt[: limits["prompt"]])
    if "answers" in limits:
        return _change(scenario, position, n=min(ask.n, limits["answers"]))
    if limits["tokens"] >= ask.max_tokens:
        return scenario
    return _change(scenario, position, max_tokens=limits["tokens"], min_tokens=0)


def _change(scenario: Scenario, position: int, **changes: Any) -> Scenario:
    if scenario.asks[position].caller is not None:  # its turns must fit
        kept = ("aborts", "priority", "at", "prompt", "caller")
        changes = {name: value for name, value in changes.items() if name in kept}
    ask = dataclasses.replace(scenario.asks[position], **changes)
    asks = (*scenario.asks[:position], ask, *scenario.asks[position + 1 :])
    return dataclasses.replace(scenario, asks=asks)
