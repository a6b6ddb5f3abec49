"""Hidden states of constrained rows, which wait in their slots until a mask is there."""

from __future__ import annotations

import torch

from nanoactor.runner.choosing import TokenChooser
from nanoactor.runner.model import LoadedModel
from nanoactor.runner.staging import DeviceDeferred


class DeferredChoices:
    """One rank's."""

    def __init__(self, model: LoadedModel, chooser: TokenChooser, slots: int) -> None:
        self._chooser = chooser
        shape = slots, model.config.hidden_size
        self.states = model.device.zeros(*shape, dtype=model.dtype)
        """(slots, hidden): behind the last position that was computed in each slot."""
        self._none = chooser.chosen[:0]

    def keep(
        self, rows: DeviceDeferred, prompts: torch.Tensor | None, continued: torch.Tensor
    ) -> None:
        """Keep what later choices need: of `prompts`, the hidden states of the step's prompts'
        tokens, and of `continued`, those of rows that computed one position each."""
        if prompts is not None and len(rows.prompt_rows):
            found = prompts.index_select(0, rows.prompt_rows)
            self.states.index_copy_(0, rows.prompt_slots, found)
        if len(continued):
            self.states.index_copy_(0, rows.continued_slots, continued)

    def choose(self, rows: DeviceDeferred) -> torch.Tensor:
        """Choose from what is kept; int32 (rows,)."""
        parts = [self._chooser.choose_from(self.states, part) for part in rows.choices]
        return torch.cat(parts) if parts else self._none

    def behind(self, hidden: torch.Tensor, rows: DeviceDeferred) -> torch.Tensor:
        """Return `hidden` with the states that choices were made from, (rows + choices, hidden)."""
        kept = [self.states.index_select(0, part.index) for part in rows.choices]
        return torch.cat((hidden, *kept))
