"""The group of sequences that belong to one request."""

from __future__ import annotations

from typing import Generic, TypeVar

M = TypeVar("M")


class SequenceGroup(Generic[M]):
    """The sequences of one request, some of which may wait while another one computes the
    prompt."""

    def __init__(self, uids: range) -> None:
        self.uids = uids
        self.followers: list[M] = []
        """Sequences that wait until another one has computed the prompt, in uid order."""
