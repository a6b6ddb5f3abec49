"""Request router for Ray Serve. It sends each call to the replica that the first argument names,
and publishes the set of replicas.

The ingress itself selects the replica (`nanoactor.fleet.routing`), by cached blocks and load, which
Ray does not know.
"""

from __future__ import annotations

from typing import Any

from nanoactor.ray_serve.api import PendingRequest, RequestRouter, RunningReplica


class ReplicaNameRouter(RequestRouter):
    """Router by replica name. Its only state is the set of replicas."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Handle a change of the set: replicas have been added, or are about to stop."""
        super().update_replicas(replicas)
        self._publish_members()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Handle the death of a replica."""
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
        """Return the replica that the call names. If that replica no longer exists, the call fails
        immediately."""
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
