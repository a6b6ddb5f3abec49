"""Choice of tokens: greedy, or by the Gumbel-max trick with noise keyed by seed and position.

The argmax of score + Gumbel noise is a sample from softmax(score). The noise depends only on (seed,
position, token id), so a sampled token does not depend on the other rows of the batch. Truncation
is that of transformers: temperature, top-k, top-p, min-p, in this order.
"""

from __future__ import annotations

import torch

from nanoactor.models.batch import SamplingBatch
from nanoactor.models.limits import CANDIDATES, NO_TOKEN
from nanoactor.models.sampling.philox import gumbel_noise, gumbel_noise_at

_ID_MASK = 0xFFFFFFFF


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Choose a token id for each row of `logits`, (rows, vocabulary), of any floating-point dtype.
    Return int64 (rows,).

    A row whose highest logit is NaN or infinite gets `limits.NO_TOKEN`. Float32 logits may be
    overwritten.
    """
    logits, groups = logits.float(), batch.groups
    if groups.masked_rows.numel():
        logits[groups.masked_rows, groups.masked_ids] = float("-inf")
    highest, chosen = logits.max(-1)  # NaN propagates, and the first of equal logits wins
    if groups.greedy.numel() == len(logits):
        return mask_non_finite(highest, chosen)
    if groups.plain.numel():
        chosen[groups.plain] = _sample_plain(logits, batch, groups.plain)
    if groups.limited.numel():
        candidates = min(CANDIDATES, logits.shape[-1])
        chosen[groups.limited] = _sample_truncated(logits, batch, groups.limited, candidates)
    for rows in (groups.unlimited, groups.nucleus):
        if rows.numel():
            chosen[rows] = _sample_truncated(logits, batch, rows, logits.shape[-1])
    return mask_non_finite(highest, chosen)


def mask_non_finite(highest: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the chosen ids, with `limits.NO_TOKEN` for rows whose highest logit is NaN or
    infinite."""
    return torch.where(highest.isfinite(), chosen, NO_TOKEN)


def scores_of(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return (logits - maximum of the row) / temperature, (rows, ids). The subtraction avoids
    overflow at very low temperatures."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


def _sample_plain(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor) -> torch.Tensor:
    scores = scores_of(logits[rows], batch.sampling.temperature[rows])
    noise = gumbel_noise(batch.seeds[rows], batch.positions[rows], scores.shape[-1])
    return (scores + noise).argmax(-1)


def _sample_truncated(
    logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor, candidates: int
) -> torch.Tensor:
    scores = scores_of(logits[rows], batch.sampling.temperature[rows])
    ids = torch.arange(scores.shape[-1], device=scores.device)
    keys = sort_keys(scores, ids).topk(candidates).values
    return sample_truncated_rows(*from_keys(keys), batch, rows)


def sort_keys(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return int64 keys. In descending order of the keys, float32 scores descend, and the ids of
    equal scores ascend.

    `topk` alone orders equal scores arbitrarily, and bfloat16 logits contain many. The bits of a
    float, read as an integer, keep the order of positive floats and reverse the order of negative
    ones.
    """
    bits = (scores + 0.0).view(torch.int32)  # the addition makes -0.0 equal 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) | (_ID_MASK - ids)


def from_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores, float32, and ids, int64, from which `sort_keys` computed `keys`."""
    ordered = (keys >> 32).int()
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), _ID_MASK - (keys & _ID_MASK)


def sample_truncated_rows(
    scores: torch.Tensor, ids: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor
) -> torch.Tensor:
    """Choose one of the candidates of each row, after truncation. Return the token ids, int64
    (rows,).

    `scores`, (rows, candidates), are in descending order, and `ids` are their token ids. `rows` are
    the rows' indices in `batch`.
    """
    params = batch.sampling
    mask = truncation_mask(scores, params.top_k[rows], params.top_p[rows], params.min_p[rows])
    noise = gumbel_noise_at(batch.seeds[rows], batch.positions[rows], ids)
    best = (scores + noise).masked_fill(~mask, float("-inf")).argmax(-1, keepdim=True)
    return ids.gather(-1, best).squeeze(-1)


def truncation_mask(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return a mask of the scores that truncation keeps, bool (rows, candidates). `scores` are in
    descending order."""
    order = torch.arange(scores.shape[-1], device=scores.device)[None]
    limit = torch.where(top_k > 0, top_k, scores.shape[-1])[:, None]
    keep = order < limit
    probabilities = scores.masked_fill(~keep, float("-inf")).softmax(-1)
    # A token is kept if the more likely ones do not reach top_p. A top_p of 1 excludes no token,
    # however the sum is rounded.
    mass_before = probabilities.cumsum(-1) - probabilities
    keep &= (mass_before < top_p[:, None]) | (top_p >= 1)[:, None]
    keep &= probabilities >= min_p[:, None] * probabilities[:, :1]
    keep[:, 0] = True
    return keep
