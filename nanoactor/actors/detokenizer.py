"""The detokenizer's actor, which converts output tokens to text. It sends output when the outbox to
the frontend has room, and merges output until then."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nanoactor.messages.engine import Open, Stop, Tokens
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.runtime.codec import encode
from nanoactor.scheduling.rehearsal import text_messages
from nanoactor.setup.actors import MAX_DELTA_BYTES, ActorConfig
from nanoactor.text.detokenizer import Detokenizer

_dummy_messages = functools.cache(text_messages)


class DetokenizerActor(Actor):
    """Actor that receives tokens from the scheduler, sends text to the frontend, and ends sequences
    whose text contains a stop string."""

    def __init__(self, config: ActorConfig) -> None:
        self._directory = config.files.tokenizer_directory
        self._delta_bytes = MAX_DELTA_BYTES
        self._step_at = 0

    def setup(self) -> None:
        """Load the tokenizer and build the tables for decoding tokens to text."""
        self._decoders = None
        if self._directory is not None:
            from nanoactor.text.decoding import DecoderFactory
            from nanoactor.text.tokenizer import load_tokenizer

            self._decoders = DecoderFactory(load_tokenizer(self._directory))
        self.reset()

    def reset(self) -> None:
        """Drop the state of all requests, but keep the decoding tables."""
        self._detokenizer = Detokenizer(self._decoders)
        self._rehearsal_detokenizer = Detokenizer(self._decoders)

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Look up the outboxes to the other actors."""
        super().start(context, ready)
        self._frontend = context.outbox("frontend")
        self._scheduler = context.outbox("scheduler")

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers of new requests and of their tokens."""
        return {Open: self._on_open, Tokens: self._on_tokens}

    def span_names(self) -> Mapping[type, str]:
        """Return the trace span names for handling new requests and tokens."""
        return {Open: "open", Tokens: "detokenize"}

    def _on_open(self, event: Open) -> None:
        self._detokenizer.open(event)
        self._report()

    def _on_tokens(self, event: Tokens) -> None:
        self._detokenizer.process(event)
        self._step_at = time.monotonic_ns()
        self._report()

    def _report(self) -> None:
        """Send ended sequences to the scheduler and output to the frontend, while the outboxes have
        room. The rest is sent later."""
        stopped = self._detokenizer.stopped
        if stopped and self._scheduler.ready:
            self._scheduler.send(Stop(np.array(stopped, np.int64)))
            stopped.clear()
        self._flush()

    def _flush(self) -> None:
        # Calling `ready` on an outbox without room requests a callback, so call it only if there is
        # output.
        while self._detokenizer.pending and self._frontend.ready:
            chunk = self._detokenizer.pop_delta(self._delta_bytes)
            if chunk is not None:
                self._frontend.send(chunk)

    def on_ready(self, outbox: Any) -> None:
        """Send output that waited because the outbox had no room."""
        self._report()

    def rehearse(self) -> Iterator[object]:
        """Process a dummy request with one output token, to warm up the CPU caches before a request
        arrives."""
        for message in _dummy_messages():
            if isinstance(message, Open):
                self._rehearsal_detokenizer.open(message)
            else:
                self._rehearsal_detokenizer.process(message)
            encode(self._rehearsal_detokenizer.pop_delta(self._delta_bytes))
            yield message

    def statistics(self) -> dict[str, Any]:
        """Return the number of requests with decoding state (`entries`) and with unsent output
        (`pending`). `step_at` is the time at which the latest tokens arrived, in ns of the
        monotonic clock."""
        return {
            "entries": self._detokenizer.entries,
            "pending": self._detokenizer.pending,
            "step_at": self._step_at,
        }
