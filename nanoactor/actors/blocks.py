"""The block manager's shell."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nanoactor.kv.manager import BlockManager
from nanoactor.messages.engine import Turn
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.setup.actors import ActorConfig, RunnerReady, encoder_limits

_HASHES_AT_ONCE = 4096
"""Maximum number of index changes in one message."""
_SOME_CHANGES = 64
"""Index changes that are worth a message; fewer are sent when a sequence ends."""


class BlockManagerActor(Actor):
    """Turns plans into steps, and answers; answers merge while the edge is busy."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._step_at = 0
        self._caches: list[int] = []
        """By rank: the cache that the manager's records describe."""
        self._manager: BlockManager

    def renew(self) -> None:
        """Keep the manager: if the runners survive, so do the contents of their caches."""

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Make the block manager, now that the runners have sized the cache."""
        super().start(context, ready)
        caches = [of_rank.cache for of_rank in ready.values() if isinstance(of_rank, RunnerReady)]
        if caches == self._caches:
            self._manager.begin_anew()
        else:
            self._caches, self._manager = caches, self._new_manager(RunnerReady.find(ready))
        self._runners = context.outbox("runners")
        self._scheduler = context.outbox("scheduler")
        if self._config.engine.prefix_salt is not None:
            self._frontend = context.outbox("frontend")
            self._manager.pool.tell_index()  # messages sent before a death may be lost

    def _new_manager(self, cache: RunnerReady) -> BlockManager:
        engine = self._config.engine
        return BlockManager(
            blocks=cache.num_blocks,
            block_size=cache.block_size,
            max_seqs=engine.max_num_seqs,
            max_model_len=self._config.files.fitted(cache.tokens).max_model_len,
            salt=self._config.salt,
            prefix_caching=engine.enable_prefix_caching,
            encoder=encoder_limits(self._config, cache),
            slot_state=self._config.files.has_slot_state,
        )

    def handlers(self) -> Mapping[type, Handler]:
        """Turns, in the order of the events from which they follow."""
        return {Turn: self._take}

    def span_names(self) -> Mapping[type, str]:
        """Binding blocks is what a step waits for."""
        return {Turn: "bind"}

    def _take(self, turn: Turn) -> None:
        """Send the step first: a device may wait for it."""
        turn = self.context.own(turn)
        if (step := self._manager.take(turn)) is not None:
            self._runners.send(step)
            self._step_at = time.monotonic_ns()
        for dropped in (turn.drop_pixels, turn.drop_masks):
            if dropped is not None:
                self._runners.send(dropped)
        self._manager.index()
        self._send_answer()
        self._tell_index(1 if len(turn.frees) or turn.forget_index else _SOME_CHANGES)

    def _send_answer(self) -> None:
        if self._scheduler.ready and (answer := self._manager.take_answer()) is not None:
            self._scheduler.send(answer)

    def _tell_index(self, at_least: int = 1) -> None:
        """Publish index changes once there are `at_least` of them; readers can wait."""
        changes = self._manager.pool.changes
        if changes is None or len(changes) < at_least:
            return
        while self._frontend.ready and (events := changes.take(_HASHES_AT_ONCE)) is not None:
            self._frontend.send(events)

    def on_ready(self, outbox: Any) -> None:
        """An edge has room again: send what was merged meanwhile."""
        self._send_answer()
        self._tell_index()

    def statistics(self) -> dict[str, Any]:
        """Blocks available now, and how much of the prompts was found in the cache.

        `hit_tokens` are the tokens that did not have to be computed; `step_at` is when the latest
        step left, in ns of the monotonic clock.
        """
        manager = self._manager
        if self._config.engine.debug:  # a look at every block
            manager.check()
        return {
            "available": manager.pool.available,
            "held_slots": manager.held,
            "evictions": manager.pool.evictions,
            "prompt_tokens": manager.hits.prompt_tokens,
            "hit_tokens": manager.hits.hit_tokens,
            "encoder_hits": manager.items.cache.hits,
            "encoder_evictions": manager.items.cache.evictions,
            "hit_ratio": manager.hits.hit_tokens / max(1, manager.hits.prompt_tokens),
            "step_at": self._step_at,
        }
