"""Log-probabilities of tokens, computed after a step for the rows that request them, some rows at a
time."""

from __future__ import annotations

import torch

from nanoactor.models.sampling.token_scores import FIXED_WORDS, TokenScorer
from nanoactor.runner.batch.inputs import ScoredRows
from nanoactor.runner.model.model import LoadedModel

# A row of logits covers the whole vocabulary. 128 rows of 152k logits take 78 MB, and sorting them
# takes as much again.
AT_ONCE = 128


class StepScorer:
    """Computes log-probabilities of tokens on one rank."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        shard = model.network.shard.vocabulary
        self._score = TokenScorer(model.group, shard.start, model.config.vocab_size)

    def score(
        self,
        prompts: torch.Tensor | None,
        hidden: torch.Tensor,
        rows: ScoredRows[torch.Tensor],
        places: torch.Tensor,
        chosen: torch.Tensor,
        *,
        num_logprobs: int,
    ) -> torch.Tensor:
        """Return the scores of a step's rows, int32 (rows, 2 + 2 * num_logprobs), in the format of
        `TokenScorer`.

        `prompts` are the hidden states of the step's prompt tokens, and `hidden` those of the rows
        that sample. `places` are the indices of the scored rows in `hidden` and in `chosen`, the
        ids of all sampled tokens.
        """
        parts = []
        if prompts is not None and len(rows.prompt_rows):
            parts += self._score_parts(prompts, rows.prompt_rows, rows.targets, num_logprobs)
        # The scores of rows that yielded no token are never read.
        targets = chosen[places].long().clamp_min(0)
        parts += self._score_parts(hidden, places, targets, num_logprobs)
        return torch.cat(parts)

    def _score_parts(
        self, hidden: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, num_logprobs: int
    ) -> list[torch.Tensor]:
        parts = []
        for at in range(0, len(rows), AT_ONCE):
            part = slice(at, at + AT_ONCE)
            logits = self._model.network.logits(hidden.index_select(0, rows[part]))
            parts.append(self._score(logits, targets[part], num_logprobs))
        return parts

    def warm_up(self, rows: int, num_logprobs: int) -> None:
        """Score `rows` tokens, to compile code and measure memory."""
        device, config = self._model.device, self._model.config
        places = device.zeros(rows, dtype=torch.int64)
        hidden = device.zeros(1, config.hidden_size, dtype=self._model.dtype)
        self._score_parts(hidden, places, places, num_logprobs)
        device.zeros(rows, FIXED_WORDS + 2 * num_logprobs, dtype=torch.int32)
        device.synchronize()
