"""Sampling with npu_top_k_top_p, for chips that have this operator. The operator truncates the
distribution, and the engine adds its own random noise.

The operator keeps every logit that equals the k-th highest. Of equal logits at the edge of top-p,
it keeps those with higher ids. If bfloat16 logits are equal there, it may therefore choose a token
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
    """Return the sampled token ids, int64 (rows,), as `nanoactor.models.sampling.sampler.sample`
    does.

    Rows with a top-k above `limits.CANDIDATES` are sampled by that function, because the operator
    accepts at most 1,024.
    """
    logits, groups = logits.float(), batch.groups
    if not groups.limited.numel() and not groups.nucleus.numel():
        return sample_portably(logits, batch)
    no_rows = groups.limited[:0]
    plain_groups = dataclasses.replace(groups, limited=no_rows, nucleus=no_rows)
    # This also masks `logits` in place.
    chosen = sample_portably(logits, dataclasses.replace(batch, groups=plain_groups))
    has_no_token = chosen == NO_TOKEN
    if groups.limited.numel():
        chosen[groups.limited] = _sample_truncated(
            logits, batch, groups.limited, batch.sampling.top_k
        )
    if groups.nucleus.numel():
        chosen[groups.nucleus] = _sample_truncated(logits, batch, groups.nucleus, None)
    return chosen.masked_fill(has_no_token, NO_TOKEN)


def _sample_truncated(
    logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor, top_k: torch.Tensor | None
) -> torch.Tensor:
    params = batch.sampling
    scores = scores_of(logits[rows], params.temperature[rows])
    truncated = torch.ops.npu.npu_top_k_top_p(
        scores, p=params.top_p[rows], k=None if top_k is None else top_k[rows].int()
    )
    probabilities = truncated.softmax(-1)
    threshold = params.min_p[rows, None] * probabilities.amax(-1, keepdim=True)
    noise = gumbel_noise(batch.seeds[rows], batch.positions[rows], scores.shape[-1])
    perturbed: torch.Tensor = (truncated + noise).masked_fill(
        probabilities < threshold, float("-inf")
    )
    return perturbed.argmax(-1)
