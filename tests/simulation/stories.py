"""What happened to each request, in the order in which it happened, for a person to read."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from nanoactor.messages.engine import (
    Abort,
    Admit,
    Answer,
    OutputDelta,
    Reject,
    Step,
    StepDone,
    Stop,
    Tokens,
    Turn,
)
from tests.simulation.scenario import Ask


class Stories:
    """One list of lines for each request; costs nothing unless it records."""

    def __init__(self, record: bool) -> None:
        self._record = record
        self._lines: defaultdict[int, list[str]] = defaultdict(list)
        self._slots: dict[int, int] = {}
        self._now = 0.0

    def _add(self, uid: int, what: str) -> None:
        self._lines[uid].append(f"{self._now * 1000:9.3f} ms  {what}")

    def submitted(self, uid: int, ask: Ask) -> None:
        """A request got its number."""
        if self._record:
            self._add(uid, f"submitted: {ask}")

    def step(self, step: Step, owners: dict[int, int]) -> None:
        """A step was stamped; `owners` are the requests by slot."""
        if not self._record:
            return
        spans = zip(step.rows.starts.tolist(), step.rows.counts.tolist(), strict=True)
        chunks = dict(zip(step.rows.slots.tolist(), spans, strict=True))
        for slot, uid in owners.items():
            if slot in chunks:
                start, count = chunks[slot]
                self._add(uid, f"step {step.step}: row {start}+{count}")
            else:
                self._add(uid, f"step {step.step}: decodes")

    def message(  # noqa: C901 - a table of messages
        self, now: float, source: str, message: Any
    ) -> None:
        """A message was sent."""
        if not self._record:
            return
        self._now = now
        match message:
            case Admit() | Reject() | Abort():
                self._add(message.uid, f"{type(message).__name__} by the {source}")
            case Turn():
                self._turn(message)
            case Answer():
                answers = zip(message.uids, message.hits, message.refunds, strict=True)
                for uid, hit, refund in answers:
                    self._add(int(uid), f"hit of {hit} tokens, {refund} blocks refunded")
            case Tokens():
                for uid, index in zip(message.uids, message.indices, strict=True):
                    self._add(int(uid), f"token {index} is known, step {message.step} is done")
                for finish in message.finishes:
                    self._add(finish.uid, f"finish: {finish.reason}")
            case StepDone():
                if message.token_ids.min(initial=0) < 0:
                    self._add(-1, f"step {message.step} brings {message.token_ids.tolist()}")
            case Stop():
                for uid in message.uids.tolist():
                    self._add(uid, "a stop string is found")
            case OutputDelta():
                for terminal in message.terminals:
                    self._add(terminal.uid, f"terminal: {terminal.reason} {terminal.error}")

    def _turn(self, turn: Turn) -> None:
        for slot in turn.frees.tolist():
            uid, fence = self._slots[slot], turn.fence
            self._add(uid, f"turn {turn.number}: gives up slot {slot}, fenced by step {fence}")
        for one in turn.admissions:
            self._slots[one.slot] = one.uid
            self._add(one.uid, f"turn {turn.number}: gets slot {one.slot}, {one.blocks} blocks")
        if turn.plan is not None:
            new = turn.plan.admissions
            self._slots |= dict(zip(new.slots.tolist(), new.uids.tolist(), strict=True))

    def __str__(self) -> str:
        """All stories."""
        parts = []
        for uid, lines in sorted(self._lines.items()):
            parts += [f"request {uid}", *(f"  {line}" for line in lines)]
        return "\n".join(parts)
