"""Batches as a runner would lay them out, from plain lists."""

import numpy as np
import torch

from nanoactor.models.batch import AttentionBatch, SamplingBatch
from nanoactor.models.limits import CANDIDATES
from nanoactor.models.sampling.columns import WORDS, column_views, pack
from nanoactor.models.sampling.rows import SamplingGroups
from nanoactor.models.seq_lens import HostSeqLens

KINDS = ("greedy", "plain", "limited", "unlimited", "nucleus")


def attention_batch(device, tables, prefills, decodes, heads, block_size, places=(), padding=0):
    """`prefills` are (tokens, context), `decodes` contexts; `tables` are the blocks of each, in
    this order, padded with `padding`; `heads` are those of queries, of keys, and their size."""
    where = device.torch_device

    def whole(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=where)

    width, rows = max((len(t) for t in tables), default=1), len(prefills)
    padded = [[*table, *[padding] * (width - len(table))] for table in tables]
    firsts = np.cumsum([0, *(tokens for tokens, _ in prefills)]).tolist()
    each = device.tokens_per_program(*heads[:2])
    lines = [[r, firsts[r], *prefills[r]] for r in range(rows)]
    tiles = [[r, t] for r, (tokens, _) in enumerate(prefills) for t in range(-(-tokens // each))]
    batch = AttentionBatch(
        whole(list(places), torch.int64),
        whole(padded).view(len(padded), width),
        block_size,
        prefill_tokens=firsts[-1],
        prefill_rows=whole(lines).view(-1, 4).T.contiguous(),
        prefill_tiles=whole(tiles).view(-1, 2).T.contiguous(),
        decode_slots=whole(list(range(rows, len(tables)))),
        decode_contexts=whole(decodes),
        lengths=HostSeqLens([t for t, _ in prefills], [c for _, c in prefills], list(decodes)),
    )
    scratch = device.scratch(max(1, len(decodes)), *heads, 10)
    return device.plan(scratch, batch)


def kind_of(row):
    """Which group a row of sampling parameters belongs to."""
    if row.get("temperature", 1.0) == 0:
        return "greedy"
    if 0 < row.get("top_k", 0) <= CANDIDATES:
        return "limited"
    if row.get("top_k", 0) > 0:
        return "unlimited"
    return "nucleus" if row.get("top_p", 1) < 1 or row.get("min_p", 0) > 0 else "plain"


def words_of(rows):
    """int32 (columns.WORDS, rows) of dictionaries of parameters; what is missing is neutral."""
    if not rows:
        return torch.zeros(WORDS, 0, dtype=torch.int32)
    return torch.from_numpy(np.stack([np.frombuffer(pack(row), np.int32) for row in rows], 1))


def sampling_batch(rows, positions, masked=(), kinds=None, device="cpu"):
    """`rows` are dictionaries of parameters, `masked` pairs (row, token id)."""
    kinds = kinds or [kind_of(row) for row in rows]

    def longs(values):
        return torch.tensor(values, dtype=torch.int64, device=device)

    groups = [longs([i for i, k in enumerate(kinds) if k == name]) for name in KINDS]
    pairs = longs([i for i, _ in masked]), longs([token for _, token in masked])
    columns = column_views(words_of(rows).to(device), torch.float32)
    return SamplingBatch(columns, longs(positions), SamplingGroups(*groups, *pairs))
