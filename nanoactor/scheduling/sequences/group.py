"""The sequences of one request."""

from __future__ import annotations

from typing import Generic, TypeVar

M = TypeVar("M")


class SequenceGroup(Generic[M]):
    """The sequences of a request, some of which may wait while another computes the prompt."""

    def __init__(self, uids: range) -> None:
        self.uids = uids
        self.followers: list[M] = []
        """Waiting sequences, by uid."""
