"""Routes each call to the replica that its first argument names, and publishes the replicas.

The ingress itself chooses (`nanoactor.fleet.routing`), by the replicas' cached blocks and load,
which Ray does not know.
"""

from __future__ import annotations

from typing import Any

from nanoactor.ray_serve.api import PendingRequest, RequestRouter, RunningReplica


class ByName(RequestRouter):
    """Router by replica name; its only state is the set of replicas."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Handle replicas that have been added or are to end."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Handle the death of a replica."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        from nanoactor.ray_serve.members import MEMBERS  # Ray sends this class by value

        MEMBERS.tell(frozenset(id_.unique_id for id_ in self.curr_replicas))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica that the call names. A call to one that is gone fails at once."""
        if pending_request is None:
            return [candidate_replicas]
        from nanoactor.ray_serve.members import ReplicaGone

        name = pending_request.args[0]
        found = [one for one in candidate_replicas if one.replica_id.unique_id == name]
        if not found and not pending_request.future.done():
            pending_request.future.set_exception(ReplicaGone(f"replica {name} no longer serves"))
            # Ray forgets calls that were fulfilled or cancelled, and no others.
            forget = getattr(self, "_remove_pending_request_from_indices", None)
            if forget is not None:
                forget(pending_request)
        return [found or candidate_replicas]
