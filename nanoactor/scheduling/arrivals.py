"""Requests as they arrive, and aborts that were here before them."""

from __future__ import annotations

from nanoactor.continuing import Resume
from nanoactor.messages import Abort, Admit, Open, Reject
from nanoactor.scheduling.edges import TEXT, Send
from nanoactor.scheduling.ends import End, rejected
from nanoactor.scheduling.ids import SeenNumbers
from nanoactor.scheduling.output import OutputBuffer
from nanoactor.scheduling.planned import as_int32
from nanoactor.scheduling.sequence import Sequence
from nanoactor.scheduling.statistics import SchedulerStatistics

_NO_TOKENS = as_int32(())


class Arrivals:
    """Knows which requests have arrived. An abort that overtakes its request leaves a tombstone,
    which swallows it."""

    def __init__(self, output: OutputBuffer, statistics: SchedulerStatistics) -> None:
        self._output = output
        self._statistics = statistics
        self.seen = SeenNumbers()
        self.tombstones: set[int] = set()

    def admit(self, event: Admit, answers: list[Sequence]) -> tuple[list[Sequence], list[Send]]:
        """Take the answers of a request; return those that live, and what to send of them."""
        living = [answer for answer in answers if not self._swallowed(answer.uid)]
        out: list[Send] = []
        for sequence in living:
            self._output.stop_ids.add(sequence.watched_ids)
            # One of them tells what the prompt has become.
            first = sequence is living[0]
            prompt = (event.token_ids.copy(), event.prompt_length) if first else (_NO_TOKENS, 0)
            out.append((TEXT, Open(sequence.uid, *prompt, event.spec.text_options)))
        return living, out

    def reject(self, event: Reject) -> None:
        """Take a request that cannot run."""
        for uid in range(event.uid, event.uid + event.answers):
            if not self._swallowed(uid):
                if not event.text:
                    self._statistics.count_abort()
                self._output.finish(uid, rejected(event.text, refused=event.refused))

    def resume(self, event: Resume) -> None:
        """Everybody began anew: those that are over do not arrive again."""
        self.seen.fill(event.below, event.living.tolist())

    def _swallowed(self, uid: int) -> bool:
        """Note that a request has arrived; True where its abort was here first."""
        self.seen.add(uid)
        if uid not in self.tombstones:
            return False
        self.tombstones.remove(uid)
        self._statistics.count_abort()
        self._output.finish(uid, End("abort"))
        return True

    def overtaken(self, event: Abort) -> bool:
        """Return True if a request was aborted before it arrived; the abort is remembered."""
        if event.uid not in self.seen:
            self.tombstones.add(event.uid)
            return True
        return False
