"""The choices of a step behind its layers, and the log-probabilities of what is chosen."""

from __future__ import annotations

import torch

from nanoactor.models.device import Device
from nanoactor.runner.batch import Update
from nanoactor.runner.choosing import TokenChooser, place
from nanoactor.runner.deferring import DeferredChoices
from nanoactor.runner.in_flight import InFlight
from nanoactor.runner.scoring import StepScorer
from nanoactor.runner.staging import DeviceUpdate


class StepChoices:
    """One rank's, behind the layers of a step."""

    def __init__(
        self, device: Device, chooser: TokenChooser, deferred: DeferredChoices, scorer: StepScorer
    ) -> None:
        self._device = device
        self._chooser = chooser
        self._deferred = deferred
        self._scorer = scorer

    def warm_up(self, rows: int, most: int) -> None:
        """Run what steps of the usual kinds do not: the choice under a mask, and so many scores."""
        self._chooser.warm_up()
        self._scorer.warm_up(rows, most)

    def choose(
        self,
        update: Update,
        staged: DeviceUpdate,
        states: tuple[torch.Tensor | None, torch.Tensor],
        buffers: InFlight,
        *,
        room: int | None,
    ) -> list[torch.Tensor]:
        """Return all tokens, int32, in the order of `RowOrder`.

        `states` are the hidden states of the prompts' tokens, and of the rows that sample: where
        the step was captured, with room for so many prompts.
        """
        of_prompts, hidden = states
        prompts = padded = 0
        if update.prefill:
            prompts, padded = len(update.prefill.sampling), len(update.prefill.ends)
        if room is not None:
            padded = room
        for part in staged.fallback:
            self._chooser.choose_behind(hidden, part, (prompts, padded))
        first, chosen = padded + update.decodes, self._chooser.chosen
        rows = first + update.resumed
        late = chosen[:0]
        if staged.deferred:
            self._deferred.keep(staged.deferred.prompt_slots, hidden, prompts)
            last = padded + update.decode_rows - len(staged.deferred.continued_slots)
            self._deferred.keep(staged.deferred.continued_slots, hidden, last)
            late = self._deferred.choose(staged.deferred)
        if staged.scores and update.scores:
            if staged.deferred:
                hidden = self._deferred.behind(hidden[:rows], staged.deferred)
            places = place(staged.scores.rows, (prompts, padded))
            every = torch.cat((chosen[:rows], late))
            table = self._scorer.score(of_prompts, hidden, staged.scores, places, every)
            buffers.take_scores(self._device, update.scores, table)
        parts = (chosen[:prompts], chosen[first:rows], chosen[padded:first], late)
        return [part for part in parts if len(part)]
