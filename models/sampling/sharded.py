"""Choice of tokens if each rank has the logits of only a part of the vocabulary.

Each rank reduces its part to a few numbers, the ranks exchange them, and each rank chooses from the
same numbers. Of equal scores, the lower id wins. The tokens are those that
`models/sampling/sampler.py` would choose.

If a device's fused sampler is part of a captured step, it needs the logits of the whole vocabulary,
which the ranks gather. This takes one collective of a few hundred kilobytes per row, whatever the
sampling parameters are.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanoactor.models.batch import SamplingBatch
from nanoactor.models.collective import Group
from nanoactor.models.limits import CANDIDATES
from nanoactor.models.sampling.philox import gumbel_noise_at
from nanoactor.models.sampling.sampler import (
    from_keys,
    mask_non_finite,
    sample_truncated_rows,
    sort_keys,
)


def gather_logits(group: Group, logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the logits of the whole vocabulary, (rows, vocabulary), given each rank's part, (rows,
    ids)."""
    return group.all_gather(logits).permute(1, 0, 2).flatten(1)[:, :vocabulary]


class ShardedSampler:
    """Samples tokens on one tensor-parallel rank, which has a part of the logits. All ranks must
    call it with the same rows, in the same order."""

    def __init__(self, group: Group, start: int, vocabulary: int) -> None:
        """`start` is the first token id of this rank. `vocabulary` is the size of the whole
        vocabulary."""
        self._group = group
        self._start = start
        self._vocabulary = vocabulary

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Return the chosen ids, int64 (rows,). `logits` are this rank's part, (rows, ids), and may
        be overwritten."""
        logits = self._mask_excluded(logits.float(), batch)
        best, chosen = self._global_argmax(
            logits, torch.arange(logits.shape[-1], device=logits.device)
        )
        groups = batch.groups
        if groups.plain.numel():
            chosen[groups.plain] = self._sample_plain(logits, best, batch)
        for rows, candidates in (
            (groups.limited, min(CANDIDATES, self._vocabulary)),
            (groups.unlimited, self._vocabulary),
            (groups.nucleus, self._vocabulary),
        ):
            if rows.numel():
                chosen[rows] = self._sample_truncated(
                    logits[rows], best[rows], batch, rows, candidates
                )
        return mask_non_finite(best, chosen)

    def _mask_excluded(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Set the logits of padding, and of ids that `min_tokens` excludes, to minus infinity."""
        valid = max(0, min(logits.shape[-1], self._vocabulary - self._start))
        logits[:, valid:] = float("-inf")
        masked_rows, masked_ids = batch.groups.masked_rows, batch.groups.masked_ids
        if masked_rows.numel():
            local, width = masked_ids - self._start, logits.shape[-1]
            is_local = (local >= 0) & (local < width)
            # Other ranks' ids go to an extra column: filtering them out would wait for the device.
            logits = F.pad(logits, (0, 1))
            logits[masked_rows, torch.where(is_local, local, width)] = float("-inf")
            logits = logits[:, :width]
        return logits

    def _global_argmax(
        self, scores: torch.Tensor, local_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the highest score of each row over all ranks, and the lowest token id that has
        this score, (rows,) each. `local_ids` are relative to the rank's first id."""
        values, local_indices = scores.max(-1)
        # One collective with one integer for both score and id; NPUs have no float64.
        keys = self._group.all_gather(sort_keys(values, local_ids[local_indices] + self._start))
        return from_keys(keys.amax(0))

    def _sample_plain(
        self, logits: torch.Tensor, best: torch.Tensor, batch: SamplingBatch
    ) -> torch.Tensor:
        rows = batch.groups.plain
        ids = torch.arange(logits.shape[-1], device=logits.device)
        scores = self._scores(logits[rows], best[rows], batch.sampling.temperature[rows])
        all_ids = (ids + self._start).expand(len(rows), -1)
        noise = gumbel_noise_at(batch.seeds[rows], batch.positions[rows], all_ids)
        return self._global_argmax(scores + noise, ids)[1]

    def _scores(
        self, logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor
    ) -> torch.Tensor:
        return (logits - best[:, None]) / temperature[:, None]

    def _sample_truncated(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        batch: SamplingBatch,
        rows: torch.Tensor,
        candidates: int,
    ) -> torch.Tensor:
        """Choose a token id for each row of `logits` among the best `candidates` ids of the whole
        vocabulary, and return int64 (rows,). Each rank contributes its own best ids."""
        scores = self._scores(logits, best, batch.sampling.temperature[rows])
        ids = torch.arange(scores.shape[-1], device=scores.device) + self._start
        local_keys = sort_keys(scores, ids).topk(min(candidates, len(ids))).values
        # (ranks, rows, candidates) to (rows, candidates of all ranks).
        keys = (
            self._group.all_gather(local_keys).permute(1, 0, 2).flatten(1).topk(candidates).values
        )
        return sample_truncated_rows(*from_keys(keys), batch, rows)
