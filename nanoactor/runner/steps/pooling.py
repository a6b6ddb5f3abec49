"""Pooling of hidden states on the device."""

from __future__ import annotations

import torch

from nanoactor.options.pooling import PoolingConfig
from nanoactor.runner.batch.inputs import PooledRows
from nanoactor.runner.model.model import LoadedModel


class StepPooler:
    """Computes the vectors of a step's pooling rows on one rank."""

    def __init__(self, model: LoadedModel, config: PoolingConfig) -> None:
        self._model, self._config = model, config

    def pool(
        self, prompts: torch.Tensor | None, hidden: torch.Tensor, rows: PooledRows
    ) -> torch.Tensor:
        """Return the result of each pooling row, float32 (rows, width). This is the row's hidden
        state, the logits of the configured `token_ids`, or, for mean pooling, the sum of the hidden
        states.

        `hidden`, (rows, hidden), are the states of the rows' last tokens, or of their first tokens
        for "cls". `prompts` are the states of all tokens in the step's chunks, which only mean
        pooling reads.
        """
        if self._config.token_ids:
            return self._model.logits_of(hidden, self._config.token_ids)
        if not rows.counts:
            return hidden.float()
        assert prompts is not None
        spans = zip(rows.firsts, rows.counts, strict=True)
        return torch.stack(
            [prompts[first : first + count].sum(0, dtype=torch.float32) for first, count in spans]
        )
