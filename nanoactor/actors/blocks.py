"""The block manager's actor, which connects the assignment of KV cache blocks with the scheduler
and the runners."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nanoactor.kv.manager import BlockManager
from nanoactor.messages.engine import Turn
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.setup.actors import ActorConfig, RunnerReady, encoder_limits

_MAX_CHANGES = 4096
"""Maximum number of changes to the prefix cache index in one message."""
_MIN_CHANGES = 64
"""Minimum number of changes to the prefix cache index in one message. Fewer are sent only when a
sequence ends, when the index is cleared, or when the outbox has room again."""


class BlockManagerActor(Actor):
    """Actor that receives turns (each contains the scheduler's decisions after one event), sends
    steps to the runners, and answers the scheduler. Answers are merged while the outbox to the
    scheduler has no room."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._step_at = 0
        self._caches: list[int] = []
        """For each rank, the identifier of the KV cache whose contents the manager tracks."""
        self._manager: BlockManager

    def reset(self) -> None:
        """Keep the block manager: if the runners survive a restart, so do the contents of their
        caches."""

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Create the block manager for the KV cache that the runners have allocated, or keep the
        existing one if the runners still have the same cache."""
        super().start(context, ready)
        cache_ids = [
            of_rank.cache for of_rank in ready.values() if isinstance(of_rank, RunnerReady)
        ]
        if cache_ids == self._caches:
            self._manager.restart()
        else:
            self._caches, self._manager = cache_ids, self._new_manager(RunnerReady.find(ready))
        self._runners = context.outbox("runners")
        self._scheduler = context.outbox("scheduler")
        if self._config.engine.prefix_salt is not None:
            self._frontend = context.outbox("frontend")
            self._manager.pool.publish_index()  # messages sent before a death may be lost

    def _new_manager(self, cache: RunnerReady) -> BlockManager:
        engine = self._config.engine
        return BlockManager(
            blocks=cache.num_blocks,
            block_size=cache.block_size,
            max_seqs=engine.max_num_seqs,
            max_model_len=self._config.files.fit_to_cache(cache.capacity_tokens).max_model_len,
            salt=self._config.salt,
            prefix_caching=engine.enable_prefix_caching,
            encoder=encoder_limits(self._config, cache),
            has_slot_state=self._config.files.has_slot_state,
        )

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handler of turns. A turn contains the scheduler's decisions after one
        event."""
        return {Turn: self._on_turn}

    def span_names(self) -> Mapping[type, str]:
        """Return the trace span name for handling the scheduler's decisions after an event. The
        next step waits for this work."""
        return {Turn: "bind"}

    def _on_turn(self, turn: Turn) -> None:
        """Process the scheduler's decisions after one event. The planned step is sent first, since
        a device may be waiting for it."""
        turn = self.context.owned_copy(turn)
        if (step := self._manager.apply_turn(turn)) is not None:
            self._runners.send(step)
            self._step_at = time.monotonic_ns()
        for dropped in (turn.drop_pixels, turn.drop_masks):
            if dropped is not None:
                self._runners.send(dropped)
        self._manager.index.update()
        self._send_answer()
        self._publish_index(1 if len(turn.frees) or turn.forget_index else _MIN_CHANGES)

    def _send_answer(self) -> None:
        if self._scheduler.ready and (answer := self._manager.take_answer()) is not None:
            self._scheduler.send(answer)

    def _publish_index(self, at_least: int = 1) -> None:
        """Send the frontend the changes to the prefix cache index, if there are at least `at_least`
        of them, as long as the outbox has room. A later call sends the rest."""
        changes = self._manager.pool.changes
        if changes is None or len(changes) < at_least:
            return
        while self._frontend.ready and (events := changes.drain(_MAX_CHANGES)) is not None:
            self._frontend.send(events)

    def on_ready(self, outbox: Any) -> None:
        """Send what was merged while the outbox had no room."""
        self._send_answer()
        self._publish_index()

    def statistics(self) -> dict[str, Any]:
        """Return the number of available blocks, and counts of cache hits and evictions since the
        start.

        `hit_tokens` is the number of prompt tokens that did not have to be computed. `step_at` is
        the time at which the latest step was sent, in ns of the monotonic clock.
        """
        manager = self._manager
        if self._config.engine.debug:  # this checks every block
            manager.check()
        return {
            "available": manager.pool.available,
            "held_slots": manager.num_held_slots,
            "evictions": manager.pool.evictions,
            "prompt_tokens": manager.hits.prompt_tokens,
            "hit_tokens": manager.hits.hit_tokens,
            "encoder_hits": manager.items.cache.hits,
            "encoder_evictions": manager.items.cache.evictions,
            "hit_ratio": manager.hits.hit_tokens / max(1, manager.hits.prompt_tokens),
            "step_at": self._step_at,
        }
