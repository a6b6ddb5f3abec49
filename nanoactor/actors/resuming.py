"""Requests that go on after everybody began anew: the journal says where they were."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence

import numpy as np

from nanoactor.actors.journal import Entry
from nanoactor.continuing import OutputSoFar
from nanoactor.messages import Submit, Terminal
from nanoactor.models.columns import rows_of
from nanoactor.suspects import Suspects

log = logging.getLogger("nanoactor.engine")

LOST = (
    "a process of the engine has died, and answers that their caller leads (beam search) do not go "
    "on: ask again"
)
CHANGED = (
    "a process of the engine has died, and the chat template renders the conversation differently "
    "now: the answer cannot go on"
)
POISON = (
    "a process of the engine has died each time the request ran, the last time with no other "
    "request: it is not tried again"
)


def resumed(entry: Entry) -> list[Submit]:
    """Return what is to be sent of a request that is not over.

    Where nothing of it was told, that is what it was. Else each of its answers goes on by itself,
    behind the tokens that were told, with the random numbers that belong to their positions.
    """
    wanted = -1 if entry.has_prompt_logprobs else entry.submit.prompt_logprobs
    if not any(answer.token_ids or answer.terminal for answer in entry.answers):
        return [dataclasses.replace(entry.submit, prompt_logprobs=wanted)]
    living = [uid for uid in entry.uids if entry.answer(uid).terminal is None]
    return [_going_on(entry, uid, wanted if uid == living[0] else -1) for uid in living]


def _going_on(entry: Entry, uid: int, prompt_logprobs: int) -> Submit:
    submit, answer = entry.submit, entry.answer(uid)
    characters = sum(map(len, answer.text))
    found = dataclasses.replace(
        submit,
        uid=uid,
        sampling=rows_of(submit.sampling)[answer.index],
        text_options=dataclasses.replace(submit.text_options, delivered=characters),
        prompt_logprobs=prompt_logprobs,
        output=(OutputSoFar(np.array(answer.token_ids, np.int32)),) if answer.token_ids else (),
    )
    if entry.media:  # pictures are placed where the text has them
        return found
    prompt = np.array(entry.prompt_token_ids, np.int32)
    return dataclasses.replace(
        found, text=None, chat=None, chat_options="", token_ids=prompt, keep_last=0
    )


def own_terminal(entry: Entry, uid: int, reason: str, error: str = "") -> Terminal:
    """Return the last word on an answer of which nobody else knows."""
    answer = entry.answer(uid)
    return Terminal(
        uid,
        reason=reason,
        stop_reason=None,
        error=error,
        tokens=len(answer.token_ids),
        characters=sum(map(len, answer.text)),
        cached_tokens=0,
        preemptions=0,
        began=-1,
    )


class Readmission:
    """Admits requests again after deaths: all at once, but for those that may be what kills; these
    are tried apart (`Suspects`)."""

    def __init__(self, most_at_work: int) -> None:
        """`most_at_work` is how many requests run at once: those that came first."""
        self._most = most_at_work
        self._suspects = Suspects()
        self.trials = 0
        """How many there were."""
        self._kept: dict[int, Entry] = {}
        """Those that wait for the end of a trial, by their first uid."""

    @property
    def is_trial(self) -> bool:
        """Tell whether some run and all others wait."""
        return bool(self._suspects.on_trial)

    @property
    def waiting(self) -> int:
        """Return how many wait for the end of a trial."""
        return len(self._kept)

    def note_death(self, entries: Iterable[Entry]) -> Entry | None:
        """Take note of a death; return who has caused it, where that is known."""
        living = [entry for entry in entries if not entry.over and _uid(entry) not in self._kept]
        living.sort(key=lambda entry: (entry.submit.priority, _uid(entry)))
        self._kept = {}
        at_work = {_uid(entry): entry for entry in living[: self._most]}
        culprit = self._suspects.note_death({uid: _told(e) for uid, e in at_work.items()})
        return None if culprit is None else at_work[culprit]

    def admit(self, entries: Iterable[Entry]) -> Sequence[Entry]:
        """Return those that go on now; the others are kept."""
        living = {_uid(entry): entry for entry in entries if not entry.over}
        told = {uid: _told(entry) for uid, entry in living.items()}
        chosen = self._suspects.admit(told)
        if chosen is None:
            return list(living.values())
        self.trials += 1
        log.warning("%d requests that may have ended a process run apart", len(chosen))
        self._kept = {uid: entry for uid, entry in living.items() if uid not in chosen}
        return [living[uid] for uid in chosen]

    def admit_next(self) -> Sequence[Entry]:
        """Return who goes on when a trial is over: all that were kept, or the next to be tried."""
        kept, self._kept = self._kept, {}
        return self.admit(kept.values())

    def keep(self, entry: Entry) -> bool:
        """Keep a new request, if there is a trial."""
        if self.is_trial:
            self._kept[_uid(entry)] = entry
        return self.is_trial

    def let_go(self, entry: Entry) -> bool:
        """Tell whether a request was kept; it is no more."""
        return self._kept.pop(_uid(entry), None) is not None

    def is_cleared(self, entries: Iterable[Entry]) -> bool:
        """Tell whether those on trial are not the ones."""
        told = {_uid(entry): _told(entry) for entry in entries if not entry.over}
        return self._suspects.is_cleared(told)


def _uid(entry: Entry) -> int:
    return entry.submit.uid


def _told(entry: Entry) -> int:
    """Tokens of an answer, on average."""
    return sum(len(answer.token_ids) for answer in entry.answers) // len(entry.answers)
