"""Actors of an engine that some requests kill."""

import os
import signal

from nanoactor.actors.runner import RunnerActor
from nanoactor.actors.tokenizer import TokenizerActor
from nanoactor.runner.simulated import SimulatedExecutor

FATAL = range(230, 300)
"""Positions: whoever has a token sampled at one of them ends the process."""
WORD = "hemlock"


class PoisonousRunner(RunnerActor):
    """Dies when a row is at a fatal position."""

    def setup(self):
        innocent = SimulatedExecutor._tokens

        def tokens(executor, positions, seeds):
            if ((positions >= FATAL.start) & (positions < FATAL.stop)).any():
                os.kill(os.getpid(), signal.SIGSEGV)
            return innocent(executor, positions, seeds)

        SimulatedExecutor._tokens = tokens
        return super().setup()


class PoisonousTokenizer(TokenizerActor):
    """Fails at a word."""

    def _on_submit(self, event):
        if WORD in (event.text or ""):
            raise ValueError("it burns")
        super()._on_submit(event)
