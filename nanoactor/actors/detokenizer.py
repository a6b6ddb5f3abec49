"""Actor around the detokenizer: sends output when the frontend has room, and merges it until
then."""

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
    """Turns tokens into chunks of output for the frontend, and stops sequences at stop strings."""

    def __init__(self, config: ActorConfig) -> None:
        self._directory = config.files.tokenizer_directory
        self._delta_bytes = MAX_DELTA_BYTES
        self._step_at = 0

    def setup(self) -> None:
        """Load the tokenizer and build its decoding tables."""
        self._decoders = None
        if self._directory is not None:
            from nanoactor.text.decoding import DecoderFactory
            from nanoactor.text.tokenizer import load_tokenizer

            self._decoders = DecoderFactory(load_tokenizer(self._directory))
        self.reset()

    def reset(self) -> None:
        """Reset the state but keep the tables."""
        self._detokenizer = Detokenizer(self._decoders)
        self._rehearsal_detokenizer = Detokenizer(self._decoders)

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Look up the outgoing edges."""
        super().start(context, ready)
        self._frontend = context.outbox("frontend")
        self._scheduler = context.outbox("scheduler")

    def handlers(self) -> Mapping[type, Handler]:
        """Handle new requests, and their tokens."""
        return {Open: self._on_open, Tokens: self._on_tokens}

    def span_names(self) -> Mapping[type, str]:
        """Name the spans that process a step's tokens."""
        return {Open: "open", Tokens: "detokenize"}

    def _on_open(self, event: Open) -> None:
        self._detokenizer.open(event)
        self._report()

    def _on_tokens(self, event: Tokens) -> None:
        self._detokenizer.process(event)
        self._step_at = time.monotonic_ns()
        self._report()

    def _report(self) -> None:
        """Send stops to the scheduler and output to the frontend, as far as their edges have
        room."""
        stopped = self._detokenizer.stopped
        if stopped and self._scheduler.ready:
            self._scheduler.send(Stop(np.array(stopped, np.int64)))
            stopped.clear()
        self._flush()

    def _flush(self) -> None:
        # Asking an edge that is not ready requests a callback: ask only if there is output to send.
        while self._detokenizer.pending and self._frontend.ready:
            chunk = self._detokenizer.pop_delta(self._delta_bytes)
            if chunk is not None:
                self._frontend.send(chunk)

    def on_ready(self, outbox: Any) -> None:
        """Handle an edge that has room again."""
        self._report()

    def rehearse(self) -> Iterator[object]:
        """Process a dummy request with a single token, from its prompt to its text."""
        for message in _dummy_messages():
            if isinstance(message, Open):
                self._rehearsal_detokenizer.open(message)
            else:
                self._rehearsal_detokenizer.process(message)
            encode(self._rehearsal_detokenizer.pop_delta(self._delta_bytes))
            yield message

    def statistics(self) -> dict[str, Any]:
        """Return the numbers of requests with decoding state and with pending output, and the time
        at which the latest step's tokens arrived, in ns of the monotonic clock."""
        return {
            "entries": self._detokenizer.entries,
            "pending": self._detokenizer.pending,
            "step_at": self._step_at,
        }
