"""Results of constrained rows wait in their slots until a mask is there."""

from __future__ import annotations

import torch

from nanoactor.runner.choosing import Kept, TokenChooser
from nanoactor.runner.model import LoadedModel
from nanoactor.runner.staging import DeviceDeferred


class DeferredChoices:
    """One rank's."""

    def __init__(self, model: LoadedModel, chooser: TokenChooser, slots: int) -> None:
        self._chooser = chooser
        shape = slots, model.config.hidden_size
        states = model.device.zeros(*shape, dtype=model.dtype)
        logits = None
        if chooser.logits is not None:
            shape = slots, model.config.vocab_size
            logits = model.device.zeros(*shape, dtype=model.dtype)
        self.kept = Kept(states, logits)
        self._none = chooser.chosen[:0]

    def keep(self, slots: torch.Tensor, hidden: torch.Tensor, first: int) -> None:
        """Keep for these slots what the rows of the step from `first` on have; `hidden` are all
        rows' hidden states."""
        if not (count := len(slots)):
            return
        at = slice(first, first + count)
        self.kept.states.index_copy_(0, slots, hidden[at])
        if self.kept.logits is not None and self._chooser.logits is not None:
            self.kept.logits.index_copy_(0, slots, self._chooser.logits[at])

    def choose(self, rows: DeviceDeferred) -> torch.Tensor:
        """Choose from what is kept; int32 (rows,)."""
        parts = [self._chooser.choose_from(self.kept, part) for part in rows.choices]
        return torch.cat(parts) if parts else self._none

    def behind(self, hidden: torch.Tensor, rows: DeviceDeferred) -> torch.Tensor:
        """Return `hidden` with the states that choices were made from, (rows + choices, hidden)."""
        kept = [self.kept.states.index_select(0, part.index) for part in rows.choices]
        return torch.cat((hidden, *kept))
