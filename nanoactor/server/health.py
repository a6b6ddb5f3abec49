"""Health of the engine, based on the time since each actor's latest step while work is pending."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Figures = Mapping[str, Mapping[str, Any]]
"""Statistics of each actor, by the actor's name."""


_DOWNSTREAM_ACTORS = ("detokenizer", "frontend")
"""Actors that process a step only after they receive its tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """Health of the engine, as returned by `/health`."""

    status: str
    """"ok", "recovering", "stalled" or "dead"."""
    culprit: str
    """The problem: the stalled actor, the processes that are being replaced, or the cause of
    death. Empty if the status is "ok"."""
    work_pending: bool
    step_age: float | None
    """Seconds since the latest completed step, or since work arrived if that was later. During
    recovery, seconds since the processes died. None if no work is pending."""
    actors: Mapping[str, Mapping[str, float | None]]
    """For each actor: "step_age", the seconds since its latest step (None if no work is pending),
    and "silence", the seconds since its last statistics."""

    @property
    def is_ok(self) -> bool:
        """True if a load balancer should send requests to this server."""
        return self.status == "ok"


def assess(figures: Figures, heard_at: Mapping[str, int], now: int, limit: float) -> Health:
    """Assess the engine's health from each actor's latest statistics.

    `heard_at` is the time of each actor's last report and `now` the current time, both in ns on the
    monotonic clock. Work is pending if the scheduler or the frontend has requests.

    An actor has stalled if, while work is pending, its latest step or its last report is more than
    `limit` seconds old. For steps, the limit is extended by the additional time that the device
    reports. Actors after the scheduler need only have processed the tokens sent to them, because a
    long prefill has steps without tokens.
    """
    scheduler = figures.get("scheduler", {})
    work_since, tokens_sent_at = (
        int(scheduler.get(name, 0)) for name in ("live_since", "tokens_at")
    )
    pending = bool(work_since) or bool(figures.get("frontend", {}).get("entries", 0))
    if scheduler.get("paused"):  # without steps, none can be late
        work_since, pending = 0, False
    actors: dict[str, dict[str, float | None]] = {}
    lags: dict[str, float] = {}
    step_allowance = max(
        (
            float(figures_of_actor.get("step_may_take", 0.0))
            for figures_of_actor in figures.values()
        ),
        default=0.0,
    )
    for name, figures_of_actor in figures.items():
        silence = (now - heard_at[name]) * 1e-9
        step_age = None
        if work_since and "step_at" in figures_of_actor:
            step_age = (now - max(int(figures_of_actor["step_at"]), work_since)) * 1e-9
        actors[name] = {"step_age": step_age, "silence": silence}
        is_caught_up = (
            name in _DOWNSTREAM_ACTORS and int(figures_of_actor.get("step_at", 0)) >= tokens_sent_at
        )
        lags[name] = max(silence, 0.0 if is_caught_up else (step_age or 0.0) - step_allowance)
    culprit = _culprit(actors, lags, limit)
    stalled = bool(culprit) and pending
    age = actors.get("scheduler", {}).get("step_age")
    return Health("stalled" if stalled else "ok", culprit if stalled else "", pending, age, actors)


def _culprit(
    actors: Mapping[str, Mapping[str, float | None]], lags: Mapping[str, float], limit: float
) -> str:
    """Return the name of the actor that most likely blocks the others, or an empty string if no
    actor is late. Actors that wait for it lag as much, but still report. Therefore, the actor with
    the oldest report is returned first, if that report is more than `limit` seconds old, and only
    then the actor with the largest lag above `limit`."""
    silent = {name: ages_of_actor["silence"] or 0.0 for name, ages_of_actor in actors.items()}
    for ages in (silent, lags):
        worst = max(ages, key=lambda name: ages[name], default="")
        if worst and ages[worst] > limit:
            return worst
    return ""


def recovering(victims: str, seconds: float) -> Health:
    """Return the health to report while processes are being replaced. `victims` are their names,
    separated by commas, and `seconds` is the time since they died."""
    return Health("recovering", victims, True, seconds, {})


def dead(reason: str) -> Health:
    """Return the health of an engine that has died for this reason."""
    return Health("dead", reason, True, None, {})
