"""Request router for Ray Serve. It sends each call to the replica named by the call's first
argument, and publishes the set of serving replicas in `MEMBERS`.

The caller, an ingress (HTTP server), selects the replica by cached blocks and load, which Ray does
not know (`nanoactor.fleet.routing`).
"""

from __future__ import annotations

from typing import Any

from nanoactor.ray_serve.api import PendingRequest, RequestRouter, RunningReplica


class ReplicaNameRouter(RequestRouter):
    """Request router that sends each call to the replica that its first argument names. Its only
    state is the set of replicas."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the set of serving replicas, because replicas have been added or are about to
        stop."""
        super().update_replicas(replicas)
        self._publish_members()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Remove a dead replica from the set of serving replicas."""
        super().on_replica_actor_died(replica_id)
        self._publish_members()

    def _publish_members(self) -> None:
        from nanoactor.ray_serve.members import MEMBERS  # here, as Ray pickles this class by value

        MEMBERS.update(frozenset(id_.unique_id for id_ in self.curr_replicas))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica that the call names in its first argument. If that replica no longer
        exists, the call fails immediately with `ReplicaGone`. Without a call, return all
        candidates."""
        if pending_request is None:
            return [candidate_replicas]
        from nanoactor.ray_serve.members import ReplicaGone

        name = pending_request.args[0]
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        if not named and not pending_request.future.done():
            pending_request.future.set_exception(
                ReplicaGone(f"replica {name} is no longer serving")
            )
            # Ray itself removes only calls that were completed or canceled.
            remove_pending = getattr(self, "_remove_pending_request_from_indices", None)
            if remove_pending is not None:
                remove_pending(pending_request)
        return [named or candidate_replicas]
