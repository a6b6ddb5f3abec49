"""Router that sends each call to the replica named by its first argument, and publishes the set of
replicas.

The ingress itself chooses the replica (`nanoactor.fleet.routing`) by cached blocks and load, which
are unknown to Ray.
"""

from __future__ import annotations

from typing import Any

from nanoactor.ray_serve.api import PendingRequest, RequestRouter, RunningReplica


class ByName(RequestRouter):
    """Router by replica name; its only state is the set of replicas."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Handle a change of the replicas: some were added, or are about to stop."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Handle the death of a replica."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        from nanoactor.ray_serve.members import MEMBERS  # here, as Ray pickles this class by value

        MEMBERS.tell(frozenset(id_.unique_id for id_ in self.curr_replicas))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica that the call names. A call to a replica that is gone fails at
        once."""
        if pending_request is None:
            return [candidate_replicas]
        from nanoactor.ray_serve.members import ReplicaGone

        name = pending_request.args[0]
        found = [one for one in candidate_replicas if one.replica_id.unique_id == name]
        if not found and not pending_request.future.done():
            pending_request.future.set_exception(ReplicaGone(f"replica {name} no longer serves"))
            # Ray itself removes only calls that were fulfilled or cancelled.
            forget = getattr(self, "_remove_pending_request_from_indices", None)
            if forget is not None:
                forget(pending_request)
        return [found or candidate_replicas]
