"""Sampling with npu_top_k_top_p, for chips that have it: what is cut is the operator's, the noise
is the engine's own.

The operator keeps every logit that equals the least of the best k, and among equal ones at the
edge of top-p the higher ids: where bfloat16 logits are equal there, a token may be chosen that
`nanoactor.models.sampling` would have cut. For one device it is the same in every batch.
"""

from __future__ import annotations

import dataclasses

import torch

from nanoactor.models.batch import SamplingBatch
from nanoactor.models.limits import NO_TOKEN
from nanoactor.models.philox import gumbel_noise
from nanoactor.models.sampling import sample as sample_portably
from nanoactor.models.sampling import scores_of


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Ids, int64 (rows,), as `nanoactor.models.sampling.sample`. Rows with a top-k beyond
    `limits.CANDIDATES` are left to that: the operator's ends at 1,024."""
    logits = logits.float()
    if not batch.limited.numel() and not batch.nucleus.numel():
        return sample_portably(logits, batch)
    nothing = batch.limited[:0]
    rest = dataclasses.replace(batch, limited=nothing, nucleus=nothing)
    chosen = sample_portably(logits, rest)  # and masks
    broken = chosen == NO_TOKEN
    if batch.limited.numel():
        chosen[batch.limited] = _cut(logits, batch, batch.limited, batch.top_k)
    if batch.nucleus.numel():
        chosen[batch.nucleus] = _cut(logits, batch, batch.nucleus, None)
    return chosen.masked_fill(broken, NO_TOKEN)


def _cut(
    logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor, top_k: torch.Tensor | None
) -> torch.Tensor:
    scores = scores_of(logits[rows], batch.temperature[rows])
    kept = torch.ops.npu.npu_top_k_top_p(
        scores, p=batch.top_p[rows], k=None if top_k is None else top_k[rows].int()
    )
    probabilities = kept.softmax(-1)
    least = batch.min_p[rows, None] * probabilities.amax(-1, keepdim=True)
    noise = gumbel_noise(batch.seeds[rows], batch.positions[rows], scores.shape[-1])
    scored: torch.Tensor = (kept + noise).masked_fill(probabilities < least, float("-inf"))
    return scored.argmax(-1)
