"""Log-probabilities of tokens: the log-softmax of the model's raw logits.

With tensor parallelism, each rank has the logits of a part of the vocabulary. The ranks exchange a
few numbers per row, and all of them get the same result.
"""

from __future__ import annotations

import torch

from nanoactor.models.collective import Group
from nanoactor.models.sampling.sampler import from_keys, sort_keys

FIXED_WORDS = 2
"""Number of int32 words at the start of a result: the target's log-probability and its rank."""


class TokenScorer:
    """Computes log-probabilities on one tensor-parallel rank, which has a part of the logits. All
    ranks must call it with the same rows, in the same order."""

    def __init__(self, group: Group, start: int, vocabulary: int) -> None:
        """`start` is the first token id of this rank. `vocabulary` is the size of the whole
        vocabulary."""
        self._group = group
        self._start = start
        self._vocabulary = vocabulary

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
        """Score `targets`, int64 (rows,), with this rank's logits, (rows, ids), which may be
        overwritten.

        Returns int32 (rows, 2 + 2 * k), where k is `num_top` or, if smaller, the size of the
        vocabulary. A row contains the bits of the target's float32 log-probability, the target's
        rank (1 is the most likely token), the ids of the k most likely tokens, and the bits of
        their log-probabilities.

        Of equal logits, the lower id comes first. If equal logits do not all fit, which of them are
        returned is unspecified.
        """
        logits = logits.float()
        valid = max(0, min(logits.shape[-1], self._vocabulary - self._start))
        logits[:, valid:] = float("-inf")  # padding; all ranks' parts are equally wide
        log_sum = self._log_sum(logits)
        target_logits = self._logits_of(logits, targets)
        num_higher = self._group.all_gather((logits > target_logits[:, None]).sum(-1)).sum(0)
        scores, ids = self._top_logits(logits, min(num_top, self._vocabulary))
        columns = [
            (target_logits - log_sum)[:, None],
            num_higher[:, None] + 1,
            ids,
            scores - log_sum[:, None],
        ]
        return torch.cat([_as_int32(column) for column in columns], dim=1)

    def _log_sum(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the log-sum-exp over the whole vocabulary, (rows,)."""
        parts = self._group.all_gather(logits.logsumexp(-1))
        return parts.logsumexp(0) if len(parts) > 1 else parts[0]

    def _logits_of(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        local = targets - self._start
        is_local = (local >= 0) & (local < logits.shape[-1])
        local_logits = logits.gather(1, torch.where(is_local, local, 0)[:, None])[:, 0]
        return self._group.all_gather(torch.where(is_local, local_logits, float("-inf"))).amax(0)

    def _top_logits(self, logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the `num_top` highest logits over the whole vocabulary, (rows, num_top), and their
        ids."""
        values, local_ids = logits.topk(min(num_top, logits.shape[-1]))
        keys = self._group.all_gather(sort_keys(values, local_ids + self._start))
        # (ranks, rows, candidates) to (rows, candidates of all ranks).
        return from_keys(keys.permute(1, 0, 2).flatten(1).topk(num_top).values)


def _as_int32(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32) if values.is_floating_point() else values.int()
