"""Copies of the scheduler and block manager that process dummy requests, to warm up the CPU caches.

After a pause of a few milliseconds, an event handler takes three to five times as long as usual:
its code and the interpreter's code have been evicted from the CPU caches. An actor that is notified
of a coming request (`Context.wake_others`) therefore processes a dummy request on its own copies
until the request arrives. The copies share code with the engine, but no state and no messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nanoactor.kv.hashing import block_hashes
from nanoactor.kv.manager import BlockManager
from nanoactor.messages.engine import (
    Admit,
    Open,
    RequestSpec,
    Step,
    StepDone,
    Stopping,
    TextOptions,
    Tokens,
)
from nanoactor.models.sampling.columns import pack
from nanoactor.runtime.codec import encode
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.edges import DETOKENIZER
from nanoactor.scheduling.scheduler import Scheduler

_PROMPT_LENGTH, _MAX_SEQS = 512, 2
_SALT = bytes(16)
_SPEC = RequestSpec(
    priority=0,
    sampling=pack({"temperature": 0.7, "top_p": 0.9}),
    stopping=Stopping(max_tokens=1, min_tokens=0, eos_ids=(0,), stop_ids=()),
    text_options=TextOptions(stop=(), include_stop=False, skip_special=True, min_tokens=0),
)
_NO_COUNTS, _TOKEN = np.empty(0, np.int32), np.array([5], np.int32)


class Rehearsal:
    """A scheduler and a block manager that serve dummy requests, one at a time. Each request has a
    prompt of 512 tokens and one output token."""

    def __init__(self, block_size: int) -> None:
        blocks, max_model_len = 4 * -(-_PROMPT_LENGTH // block_size), 2 * _PROMPT_LENGTH
        self._scheduler = Scheduler(
            SchedulerConfig(
                blocks=blocks,
                block_size=block_size,
                max_num_seqs=_MAX_SEQS,
                max_num_batched_tokens=_PROMPT_LENGTH,
                max_model_len=max_model_len,
            )
        )
        self._manager = BlockManager(blocks, block_size, _MAX_SEQS, max_model_len, _SALT)
        self._block_size = block_size
        self._uid = 0

    def next_request(self) -> Admit:
        """Return a new dummy request. Its blocks differ from those of all earlier requests."""
        tokens = np.arange(_PROMPT_LENGTH, dtype=np.int32) + 7 * self._uid
        request = Admit(
            uid=self._uid,
            spec=_SPEC,
            token_ids=tokens,
            prompt_length=_PROMPT_LENGTH,
            hashes=block_hashes(tokens, self._block_size, _SALT, extras={}),
        )
        self._uid += 1
        return request

    def run(self) -> Iterator[Any]:
        """Serve one dummy request. Yield each message that an engine would send to another process,
        after encoding the message. Yield None for each scheduler decision that plans no step."""
        yield from self._handle(self.next_request())
        yield from self._drain_answers()
        done = StepDone(
            self._uid,
            counts=_NO_COUNTS,
            token_ids=_TOKEN,
            seconds=0.001,
            began=0,
        )
        yield from self._handle(done)
        yield from self._drain_answers()

    def _drain_answers(self) -> Iterator[Any]:
        while (answer := self._manager.take_answer()) is not None:
            yield from self._handle(answer)

    def _handle(self, event: Any) -> Iterator[Any]:
        for edge, message in self._scheduler.handle(event):
            sent = message if edge == DETOKENIZER else self._manager.apply_turn(message)
            if sent is not None:
                encode(sent)
            yield sent


def first_step(block_size: int) -> Step:
    """Return the step that computes the prompt of a dummy request; `block_size` is in tokens."""
    return next(sent for sent in Rehearsal(block_size).run() if type(sent) is Step)


def text_messages() -> list[Open | Tokens]:
    """Return all messages that the detokenizer receives for a dummy request, in order."""
    sent = Rehearsal(_PROMPT_LENGTH).run()
    return [message for message in sent if isinstance(message, Open | Tokens)]
