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
        """Return the pooled vector of each row, float32 (rows, width). `hidden` are the states of
        the rows' last tokens (of their first tokens for "cls"), (rows, hidden). `prompts` are the
        states of all tokens in the step's chunks. For mean pooling, sums are returned, accumulated
        in float32."""
        if self._config.token_ids:
            return self._model.logits_of(hidden, self._config.token_ids)
        if not rows.counts:
            return hidden.float()
        assert prompts is not None
        spans = zip(rows.firsts, rows.counts, strict=True)
        return torch.stack(
            [prompts[first : first + count].sum(0, dtype=torch.float32) for first, count in spans]
        )
