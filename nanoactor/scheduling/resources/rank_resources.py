"""Tracking of masks and pixels, which every rank must hold before a step may use them."""

from __future__ import annotations

import dataclasses

from nanoactor.errors import ProtocolBug


@dataclasses.dataclass(slots=True)
class _Resource:
    """One owner's request for a resource (a mask or pixels), and the versions that the ranks
    hold."""

    version: int
    requested_at: int
    """Tick count at which `version` was requested."""
    is_requested: bool = True
    held: dict[int, int] = dataclasses.field(default_factory=dict)
    """Newest version that each rank holds, by rank number."""


class RankResources:
    """Tracks which ranks hold the resource (a mask or pixels) that each owner has requested.

    An owner is a number, such as a request's uid. It requests one version at a time. Versions start
    at 0 and increase. A rank may hold a version before the owner requests it.
    """

    def __init__(self, name: str, ranks: int, timeout_ticks: int = 0) -> None:
        """Create an empty set. `name` appears in error messages. A version is overdue
        `timeout_ticks` ticks after its request; 0 means never."""
        self._name, self._ranks, self._timeout_ticks = name, ranks, timeout_ticks
        self._resources: dict[int, _Resource] = {}
        self._ticks = 0
        self.missing = 0
        """Number of owners whose requested version is missing on some rank."""

    def __contains__(self, owner: int) -> bool:
        """Return True if the owner has requested a version and has not been dropped."""
        return owner in self._resources

    def request(self, owner: int, version: int = 0) -> None:
        """Request a version of an owner's resource. This replaces the owner's earlier request.

        Raises `ProtocolBug` if this version or a later one was already requested.
        """
        resource = self._resources.get(owner)
        if resource is None:
            self._resources[owner] = _Resource(version, self._ticks)
        else:
            if version <= resource.version:
                raise ProtocolBug(
                    f"version {version} of the {self._name} of {owner} was requested twice, or "
                    f"after version {resource.version}"
                )
            self.withdraw(owner)
            resource.version, resource.requested_at, resource.is_requested = (
                version,
                self._ticks,
                True,
            )
        self.missing += not self.is_ready(owner)

    def note_ready(self, rank: int, owner: int, version: int = 0) -> None:
        """Record that a rank has received a version of an owner's resource. Ignored if the owner
        was dropped.

        Raises `ProtocolBug` if the version is older than the one requested last, if it is not newer
        than the one that the rank already holds, or if it replaces a version that is still
        requested.
        """
        resource = self._resources.get(owner)
        if resource is None:
            return
        held = resource.held.get(rank, -1)
        replaces = resource.is_requested and held == resource.version
        if version <= held or version < resource.version or replaces:
            raise ProtocolBug(
                f"rank {rank} reported version {version} of the {self._name} of {owner}; it held "
                f"version {held} before (-1 means none), and version {resource.version} was "
                "requested last"
            )
        resource.held[rank] = version
        self.missing -= (
            resource.is_requested and version == resource.version and self.is_ready(owner)
        )

    def is_ready(self, owner: int) -> bool:
        """Return True if every rank holds the version of the resource that the owner has requested;
        False if the request was withdrawn."""
        resource = self._resources[owner]
        if not resource.is_requested:
            return False
        return list(resource.held.values()).count(resource.version) == self._ranks

    def requested(self, owner: int) -> int | None:
        """Return the version that the owner has requested; None if the request was withdrawn."""
        resource = self._resources[owner]
        return resource.version if resource.is_requested else None

    def withdraw(self, owner: int) -> None:
        """Withdraw an owner's request because the version was used or will not arrive. The owner
        may request a later version."""
        resource = self._resources[owner]
        self.missing -= resource.is_requested and not self.is_ready(owner)
        resource.is_requested = False

    def drop(self, owner: int) -> None:
        """Remove an owner and its request, if present."""
        if owner in self._resources:
            self.withdraw(owner)
            del self._resources[owner]

    def tick(self) -> list[int]:
        """Advance the clock by one tick. Return the owners whose requested version is overdue."""
        self._ticks += 1
        return [
            owner
            for owner, resource in self._resources.items()
            if self._timeout_ticks
            and resource.is_requested
            and not self.is_ready(owner)
            and self._ticks - resource.requested_at >= self._timeout_ticks
        ]

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if any owner has not been dropped."""
        if self._resources or self.missing:
            raise ProtocolBug(
                f"{self._name} of {[*self._resources]} are still requested after their end"
            )
