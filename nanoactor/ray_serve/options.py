"""Options of a fleet, in addition to those of the engines and of the server."""

from __future__ import annotations

import dataclasses

from nanoactor.errors import InvalidConfig
from nanoactor.fleet.fleet import SILENCE_TIMEOUT
from nanoactor.fleet.pacing import INTERVAL
from nanoactor.fleet.wire import Load

_MAX_VALUE = 3600.0


@dataclasses.dataclass(frozen=True)
class FleetConfig:
    """Options of `nanoactor serve` with several replicas. The constructor raises `InvalidConfig`,
    naming the first invalid option."""

    replicas: int = 0
    """Number of engines that serve on Ray, each with all of the options above. With 0, one engine
    serves without Ray."""
    max_replicas: int | None = None
    """Maximum number of replicas: more are started while requests wait, and stopped when they are
    no longer needed. Default: the value of `--replicas`."""
    ray_address: str | None = None
    """The address of a Ray cluster to join, or "auto" for the one on this machine. Default: start a
    private Ray instance on this machine only and stop it with the server."""
    ingresses: int | None = None
    """Number of HTTP servers in front of the engines, at most one on each node (usually a machine)
    of the Ray cluster. Default: one on each node."""
    cpus_per_replica: float = 1.0
    """CPUs that Ray reserves for the processes of each replica."""
    silence_timeout: float = SILENCE_TIMEOUT
    """Seconds without a message after which a replica is considered hung. Its streams continue on
    other replicas."""
    report_interval: float = INTERVAL
    """Interval, in seconds, at which a replica reports on its running streams. Each report takes
    CPU time, and longer intervals make text arrive in larger pieces. First tokens and the ends of
    streams are reported at once."""
    target_waiting_tokens: int = 20_000
    """Number of prompt tokens that may wait on each replica before another replica is started (up
    to `max_replicas`)."""

    def __post_init__(self) -> None:
        """Check all options. Raises `InvalidConfig`, naming the first invalid one."""
        self._check_integer("replicas", minimum=0)
        for name in ("max_replicas", "ingresses"):
            if getattr(self, name) is not None:
                self._check_integer(name, minimum=1)
        self._check_integer("target_waiting_tokens", minimum=1)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidConfig(
                f"max_replicas ({self.max_replicas}) must be at least replicas ({self.replicas})"
            )
        for name, minimum in (
            ("cpus_per_replica", 0.0),
            ("silence_timeout", 1.0),
            ("report_interval", 0.001),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not minimum <= value <= _MAX_VALUE:
                raise InvalidConfig(
                    f"{name} must be a number from {minimum:g} to {_MAX_VALUE:g}, "
                    f"got {value!r:.100}"
                )
        if self.ray_address is not None and (
            not isinstance(self.ray_address, str) or not self.ray_address
        ):
            raise InvalidConfig(
                f"ray_address must be a non-empty string, got {self.ray_address!r:.100}"
            )
        if not self.replicas:
            self._check_unused()

    def _check_unused(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default:
                raise InvalidConfig(f"{field.name} works only with replicas; also set --replicas")

    def _check_integer(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise InvalidConfig(
                f"{name} must be an integer of at least {minimum}, got {value!r:.100}"
            )

    def demand(self, load: Load, max_num_seqs: int) -> float:
        """Return the number of replicas, possibly fractional, that would be needed for one
        replica's load."""
        by_streams = load.streams / max_num_seqs
        return max(by_streams, load.waiting_tokens / self.target_waiting_tokens)
