"""What work needs on every rank before it is planned: masks, pixels."""

from __future__ import annotations

import dataclasses

from nanoactor.errors import ProtocolBug


@dataclasses.dataclass(slots=True)
class _Resource:
    """What one owner needs."""

    version: int
    since: int
    """How often the clock had ticked when this version was wanted."""
    is_wanted: bool = True
    held: dict[int, int] = dataclasses.field(default_factory=dict)
    """By rank: the newest version that it holds."""


class RankResources:
    """Knows which resources every rank holds. An owner wants one version at a time, each later
    than the one before; a rank may hold a version before it is wanted."""

    def __init__(self, name: str, ranks: int, periods: int = 0) -> None:
        """Without `periods`, nothing is ever overdue."""
        self._name, self._ranks, self._periods = name, ranks, periods
        self._resources: dict[int, _Resource] = {}
        self._ticks = 0
        self.missing = 0
        """How many owners want a version that some rank does not hold."""

    def __contains__(self, owner: int) -> bool:
        """Tell whether an owner has wanted something, and not dropped it."""
        return owner in self._resources

    def __len__(self) -> int:
        """Return how many owners there are."""
        return len(self._resources)

    def want(self, owner: int, version: int = 0) -> None:
        """An owner needs a version from now on, and none before it any more. Raises `ProtocolBug`
        where that was wanted before."""
        resource = self._resources.get(owner)
        if resource is None:
            resource = self._resources[owner] = _Resource(version, self._ticks)
        else:
            if version <= resource.version:
                raise ProtocolBug(f"{self._name} {version} of {owner} is wanted twice")
            self.withdraw(owner)
            resource.version, resource.since, resource.is_wanted = version, self._ticks, True
        self.missing += not self.is_ready(owner)

    def note_ready(self, rank: int, owner: int, version: int = 0) -> None:
        """A rank holds a version. What nobody owns any more does not count. Raises `ProtocolBug`
        where it held that, or a later one, before."""
        resource = self._resources.get(owner)
        if resource is None:
            return
        held = resource.held.get(rank, resource.version - 1)
        if version <= held:
            raise ProtocolBug(
                f"rank {rank} holds {self._name} {version} of {owner}; it held {held} before, or "
                f"none is due before {resource.version}"
            )
        resource.held[rank] = version
        self.missing -= resource.is_wanted and version == resource.version and self.is_ready(owner)

    def is_ready(self, owner: int) -> bool:
        """Tell whether every rank holds what an owner wants."""
        resource = self._resources[owner]
        held = list(resource.held.values())
        return resource.is_wanted and held.count(resource.version) == self._ranks

    def wanted(self, owner: int) -> int | None:
        """Return the version that an owner wants; None where it wants none at the moment."""
        resource = self._resources[owner]
        return resource.version if resource.is_wanted else None

    def withdraw(self, owner: int) -> None:
        """What an owner wants will not come, or was used; it may want a later version."""
        resource = self._resources[owner]
        self.missing -= resource.is_wanted and not self.is_ready(owner)
        resource.is_wanted = False

    def drop(self, owner: int) -> bool:
        """Forget an owner; return whether there was one."""
        if owner not in self._resources:
            return False
        self.withdraw(owner)
        del self._resources[owner]
        return True

    def tick(self) -> list[int]:
        """The clock ticks: return the owners whose resource was missing for so many periods."""
        self._ticks += 1
        return [
            owner
            for owner, resource in self._resources.items()
            if self._periods
            and resource.is_wanted
            and not self.is_ready(owner)
            and self._ticks - resource.since >= self._periods
        ]

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if anybody owns anything."""
        if self._resources or self.missing:
            raise ProtocolBug(f"{self._name} of {[*self._resources]} are wanted, though none lives")
