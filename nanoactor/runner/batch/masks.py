"""Token masks of constrained sequences, stored on a runner's host until a step uses them."""

from __future__ import annotations

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.messages.engine import Step
from nanoactor.messages.grammar import DropMasks, Int32, Masks

_NO_MASKS = np.empty((0, 0), np.int32)


class MaskStore:
    """Stores the next mask of each constrained sequence. There is at most one, because the next
    mask arrives only after the token sampled under the previous one is known.

    Both the grammar actor and the scheduler report the end of a sequence, in either order. The
    grammar actor lists the sequence as closed in its last message; the scheduler reports that no
    later step refers to the sequence. Masks that arrive after the scheduler's report are dropped.
    """

    def __init__(self) -> None:
        self._masks: dict[int, tuple[int, Int32]] = {}
        """(position, mask) of each sequence's next mask, by uid (the sequence's number)."""
        self._uids: dict[int, int] = {}
        """Uid of the sequence in each slot (the sequence's index in the batch)."""
        self._closed: set[int] = set()
        """Uids of sequences whose end only the grammar actor has reported."""
        self._dropped: set[int] = set()
        """Uids of sequences whose end only the scheduler has reported."""

    def __len__(self) -> int:
        """Return the number of sequences that have a mask, or whose end only one of the grammar
        actor and the scheduler has reported."""
        return len(self._masks.keys() | self._closed | self._dropped)

    def add(self, event: Masks) -> tuple[list[int], list[int]]:
        """Store new masks. Return the uids (sequence numbers) and the positions of the masks that a
        step may still use."""
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
        """Drop the masks of sequences to which no later step refers."""
        for uid in event.uids.tolist():
            self._masks.pop(uid, None)
            self._end(uid, self._closed, self._dropped)

    def _end(self, uid: int, other: set[int], mine: set[int]) -> None:
        if uid in other:
            other.remove(uid)
        else:
            mine.add(uid)

    def pop_masks(self, step: Step) -> Int32:
        """Remove and return the masks of a step's constrained rows, int32 (rows, words). Raises
        `ProtocolBug` if a mask is missing, because a row without its mask could sample any
        token."""
        new = zip(step.admissions.slots.tolist(), step.admissions.uids.tolist(), strict=True)
        self._uids.update(new)
        if not len(step.rows):
            return _NO_MASKS
        choices, masks = step.rows.take(step.rows.choices), []
        for slot, position in zip(choices.slots.tolist(), choices.starts.tolist(), strict=True):
            uid = self._uids[slot]
            found, mask = self._masks.pop(uid, (-1, _NO_MASKS))
            if found != position:
                held = f"it holds the mask for {found}" if found >= 0 else "it holds no mask"
                raise ProtocolBug(
                    f"step {step.step} needs the mask of request {uid} for position {position}, "
                    f"but {held}"
                )
            masks.append(mask)
        return np.stack(masks) if masks else _NO_MASKS
