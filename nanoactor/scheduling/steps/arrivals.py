"""Arriving requests, and aborts that arrive before their requests."""

from __future__ import annotations

from nanoactor.messages.engine import Abort, Admit, Open, Reject
from nanoactor.messages.resuming import Resume
from nanoactor.scheduling.edges import DETOKENIZER, Outgoing
from nanoactor.scheduling.sequences.ends import End, rejected
from nanoactor.scheduling.sequences.ids import SeenNumbers
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.statistics import SchedulerStatistics
from nanoactor.scheduling.steps.output import OutputBuffer
from nanoactor.scheduling.steps.planned import as_int32

_NO_TOKENS = as_int32(())


class Arrivals:
    """Tracks which requests have arrived. An abort that arrives before its request leaves a
    *tombstone*, which aborts the request on arrival."""

    def __init__(self, output: OutputBuffer, statistics: SchedulerStatistics) -> None:
        self._output = output
        self._statistics = statistics
        self.seen = SeenNumbers()
        self.tombstones: set[int] = set()

    def admit(
        self, event: Admit, sequences: list[Sequence]
    ) -> tuple[list[Sequence], list[Outgoing]]:
        """Register a request's sequences. Return those that were not aborted before they arrived,
        and their `Open` messages for the detokenizer."""
        live = [s for s in sequences if not self._consume_tombstone(s.uid)]
        out: list[Outgoing] = []
        for sequence in live:
            self._output.stop_ids.add(sequence.watched_ids)
            # Only the first message carries the tokenized prompt.
            first = sequence is live[0]
            prompt = (event.token_ids.copy(), event.prompt_length) if first else (_NO_TOKENS, 0)
            out.append((DETOKENIZER, Open(sequence.uid, *prompt, event.spec.text_options)))
        return live, out

    def reject(self, event: Reject) -> None:
        """Finish all sequences of a request that cannot run."""
        for uid in range(event.uid, event.uid + event.answers):
            if not self._consume_tombstone(uid):
                if not event.text:
                    self._statistics.count_abort()
                self._output.finish(uid, rejected(event.text, refused=event.refused))

    def resume(self, event: Resume) -> None:
        """After a restart, mark finished requests as seen, since they will not arrive again."""
        self.seen.fill(event.below, event.living.tolist())

    def _consume_tombstone(self, uid: int) -> bool:
        """Record that a sequence has arrived. Return True if an abort arrived first; the sequence
        is then finished."""
        self.seen.add(uid)
        if uid not in self.tombstones:
            return False
        self.tombstones.remove(uid)
        self._statistics.count_abort()
        self._output.finish(uid, End("abort"))
        return True

    def note_early_abort(self, event: Abort) -> bool:
        """Return True if an abort has arrived before its request, which will then be aborted on
        arrival; otherwise return False."""
        if event.uid not in self.seen:
            self.tombstones.add(event.uid)
            return True
        return False
