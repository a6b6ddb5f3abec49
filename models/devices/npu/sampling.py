"""Sampling with npu_top_k_top_p, for chips that have it. The operator truncates; the noise is the
engine's own.

The operator keeps every logit that equals the k-th highest, and of equal logits at the edge of
top-p it keeps those with higher ids. So if bfloat16 logits are equal there, it may choose a token
that `nanoactor.models.sampling.sampler` would have removed. On one device, the choice is the same
in every batch.
"""

from __future__ import annotations

import dataclasses

import torch

from nanoactor.models.batch import SamplingBatch
from nanoactor.models.limits import NO_TOKEN
from nanoactor.models.sampling.philox import gumbel_noise
from nanoactor.models.sampling.sampler import sample as sample_portably
from nanoactor.models.sampling.sampler import scores_of


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return token ids, int64 (rows,), as `nanoactor.models.sampling.sampler.sample` does. That
    function still samples the rows with a top-k above `limits.CANDIDATES`: the operator's limit is
    1,024."""
    logits, groups = logits.float(), batch.groups
    if not groups.limited.numel() and not groups.nucleus.numel():
        return sample_portably(logits, batch)
    nothing = groups.limited[:0]
    rest = dataclasses.replace(groups, limited=nothing, nucleus=nothing)
    # This also masks `logits` in place.
    chosen = sample_portably(logits, dataclasses.replace(batch, groups=rest))
    broken = chosen == NO_TOKEN
    if groups.limited.numel():
        chosen[groups.limited] = _cut(logits, batch, groups.limited, batch.sampling.top_k)
    if groups.nucleus.numel():
        chosen[groups.nucleus] = _cut(logits, batch, groups.nucleus, None)
    return chosen.masked_fill(broken, NO_TOKEN)


def _cut(
    logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor, top_k: torch.Tensor | None
) -> torch.Tensor:
    by = batch.sampling
    scores = scores_of(logits[rows], by.temperature[rows])
    kept = torch.ops.npu.npu_top_k_top_p(
        scores, p=by.top_p[rows], k=None if top_k is None else top_k[rows].int()
    )
    probabilities = kept.softmax(-1)
    least = by.min_p[rows, None] * probabilities.amax(-1, keepdim=True)
    noise = gumbel_noise(batch.seeds[rows], batch.positions[rows], scores.shape[-1])
    scored: torch.Tensor = (kept + noise).masked_fill(probabilities < least, float("-inf"))
    return scored.argmax(-1)
