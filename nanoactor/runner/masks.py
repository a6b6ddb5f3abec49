"""Masks of constrained answers on a runner's host, until a step uses them."""

from __future__ import annotations

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.grammar.messages import DropMasks, Int32, Masks
from nanoactor.messages import Step

_NO_MASKS = np.empty((0, 0), np.int32)


class MaskStore:
    """At most one mask for each answer: the next comes when its token is known.

    An answer ends twice, in either order: the grammar has said its last word, and the scheduler
    that no later step names it. Masks that come between are dropped.
    """

    def __init__(self) -> None:
        self._masks: dict[int, tuple[int, Int32]] = {}
        """By answer: the position that it is for, and the row."""
        self._uids: dict[int, int] = {}
        """The answer in each slot."""
        self._closed: set[int] = set()
        """The grammar says no more of these; ..."""
        self._dropped: set[int] = set()
        """... nobody wants to hear more of these."""

    def __len__(self) -> int:
        """Return the number of sequences that have a mask or have ended once, but not twice."""
        return len(self._masks.keys() | self._closed | self._dropped)

    def add(self, event: Masks) -> tuple[list[int], list[int]]:
        """Take masks; return the answers and positions of those that are wanted."""
        uids: list[int] = []
        positions: list[int] = []
        rows = zip(event.uids.tolist(), event.positions.tolist(), event.masks, strict=True)
        for uid, position, mask in rows:
            if uid not in self._dropped:
                self._masks[uid] = position, mask.copy()
                uids.append(uid)
                positions.append(position)
        for uid in event.closed.tolist():
            self._end(uid, self._dropped, self._closed)
        return uids, positions

    def drop(self, event: DropMasks) -> None:
        """No later step names these."""
        for uid in event.uids.tolist():
            self._masks.pop(uid, None)
            self._end(uid, self._closed, self._dropped)

    def _end(self, uid: int, other: set[int], mine: set[int]) -> None:
        if uid in other:
            other.remove(uid)
        else:
            mine.add(uid)

    def take(self, step: Step) -> Int32:
        """Return the masks that a step's rows choose under, (rows, words); they are used up. Raises
        `ProtocolBug` where one is not here: a row without its mask would choose anything."""
        new = zip(step.admissions.slots.tolist(), step.admissions.uids.tolist(), strict=True)
        self._uids.update(new)
        if not len(step.rows):
            return _NO_MASKS
        choices, masks = step.rows.take(step.rows.choices), []
        for slot, position in zip(choices.slots.tolist(), choices.starts.tolist(), strict=True):
            uid = self._uids[slot]
            found, mask = self._masks.pop(uid, (-1, _NO_MASKS))
            if found != position:
                held = f"it holds that for {found}" if found >= 0 else "it holds none"
                raise ProtocolBug(
                    f"step {step.step} needs the mask of request {uid} for {position}: {held}"
                )
            masks.append(mask)
        return np.stack(masks) if masks else _NO_MASKS
