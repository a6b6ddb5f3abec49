"""npu_fusion_attention, forward only: BSH, SBH, BSND, BNSD and TND; sparse modes 0 to 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.npu.reference import contract
from tests.npu.reference.attention import INT_MAX, attend, band, check_compressed
from tests.npu.reference.contract import FLOAT_TYPES, Checker

Result = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]
RANKS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
REFUSED: dict[str, object] = dict.fromkeys(
    ("pse", "padding_mask", "prefix", "sink", "dropout_mask")
) | {"keep_prob": 1.0, "seed": 0, "offset": 0}
Span = tuple[int, int]


@dataclass(frozen=True)
class Job:
    """One call: canonical tensors, (T, N, D) or (B, S, N, D), and what selects keys."""

    check: Checker
    query: Tensor
    key: Tensor
    value: Tensor
    layout: str
    mask: Tensor | None
    scale: float
    pre_tokens: int
    next_tokens: int
    sparse_mode: int

    @property
    def packed(self) -> bool:
        """Whether the sequences are concatenated (the document's varlen scene)."""
        return self.layout == "TND"


def _canonical(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """The tensor with axes (B, S, N, D), or (T, N, D) for TND."""
    if layout in ("BSH", "SBH"):
        split = tensor.reshape(*tensor.shape[:2], heads, tensor.size(2) // heads)
        return split if layout == "BSH" else split.transpose(0, 1)
    return tensor.transpose(1, 2) if layout == "BNSD" else tensor


def _back(tensor: Tensor, layout: str) -> Tensor:
    """Canonical axes back into the layout's."""
    if layout == "BSH":
        return tensor.flatten(2)
    if layout == "SBH":
        return tensor.transpose(0, 1).flatten(2)
    return tensor.transpose(1, 2).contiguous() if layout == "BNSD" else tensor


def _check_shapes(job: Job, heads: int) -> None:
    """N_q a multiple of N_kv up to 256, D_q = D_k >= D_v up to 768, one batch, one S of K and V."""
    check, query, key, value = job.check, job.query, job.key, job.value
    check.require(
        query.size(-2) == heads and 1 <= heads <= 256,
        "head_num",
        heads,
        f"query's N={query.size(-2)}, 1 to 256",
    )
    check.require(heads % key.size(-2) == 0, "key", f"N={key.size(-2)}", f"a divisor of {heads}")
    check.shape("value", value[..., :0], key[..., :0].shape, "key's, up to D")
    dim = query.size(-1)
    check.require(key.size(-1) == dim <= 768, "key", f"D={key.size(-1)}", f"{dim}, at most 768")
    check.require(value.size(-1) <= dim, "value", f"D={value.size(-1)}", f"at most {dim}")
    if not job.packed:
        check.require(key.size(0) == query.size(0), "key", key.size(0), f"batch {query.size(0)}")


def _ends(job: Job, argument: str, given: Sequence[int] | None, total: int) -> list[Span]:
    """Cumulative lengths; zeros at the tail switch batches off ("尾部传入对应个数个0即可")."""
    check = job.check
    check.require(given is not None, argument, None, "cumulative lengths for TND")
    ends = [int(end) for end in given or ()]
    check.require(0 < len(ends) <= 1024, argument, f"{len(ends)} values", "1 to 1024 of them")
    used = list(ends)
    while used and used[-1] == 0:
        used.pop()
    starts = [0, *used[:-1]]
    growing = all(end >= start for start, end in zip(starts, used, strict=False))
    check.require(growing, argument, ends, "non-decreasing values but for zeros at the tail")
    last = used[-1] if used else 0
    idle = len(used) < len(ends)
    check.require(
        last <= total if idle else last == total, argument, ends, f"a last value of T={total}"
    )
    return [(start, end - start) for start, end in zip(starts, used, strict=False)]


def _spans(
    job: Job,
    q_ends: Sequence[int] | None,
    kv_ends: Sequence[int] | None,
) -> list[tuple[int, Span, Span]]:
    """(batch row, query span, key span) of every sequence that takes part."""
    if not job.packed:
        whole = ((0, job.query.size(1)), (0, job.key.size(1)))
        return [(row, *whole) for row in range(job.query.size(0))]
    queries = _ends(job, "actual_seq_qlen", q_ends, job.query.size(0))
    keys = _ends(job, "actual_seq_kvlen", kv_ends, job.key.size(0))
    job.check.require(
        len(queries) == len(keys),
        "actual_seq_kvlen",
        len(keys),
        f"{len(queries)} sequences, as actual_seq_qlen",
    )
    return [(row, *pair) for row, pair in enumerate(zip(queries, keys, strict=True))]


def _check_mask(job: Job, longest: Span) -> None:
    """bool or uint8; modes 2-4 the compressed square; 0 and 1 BNSS, B1SS, 11SS or SS (TND: SS)."""
    check, mask, mode = job.check, job.mask, job.sparse_mode
    if mask is None:
        return
    check.dtype("atten_mask", mask, (torch.bool, torch.uint8))
    if mode in (2, 3, 4):
        check_compressed(check, mask)
        return
    check.rank("atten_mask", mask, *((2,) if job.packed else (2, 4)))
    check.shape("atten_mask", mask, (*mask.shape[:-2], *longest), "SS = (maxSq, maxSkv)")
    if mask.dim() == 4:
        batch, heads = job.query.size(0), job.query.size(2)
        check.require(
            tuple(mask.shape[:2]) in ((batch, heads), (batch, 1), (1, 1)),
            "atten_mask",
            tuple(mask.shape),
            "BNSS, B1SS, 11SS or SS",
        )


def _visible(job: Job, row: int, queries: int, keys: int) -> Tensor | None:
    """The keys each query sees; without a mask sparse_mode and the tokens do not count."""
    mask, mode, corner = job.mask, job.sparse_mode, keys - queries
    if mask is None:
        return None
    if mode == 2:
        return band(queries, keys, INT_MAX, 0, 0)
    if mode == 3:
        return band(queries, keys, INT_MAX, 0, corner)
    if mode == 4:
        return band(queries, keys, job.pre_tokens, job.next_tokens, corner)
    part = mask if mask.dim() == 2 else mask[row if mask.size(0) > 1 else 0]
    seen = part[..., :queries, :keys].to(torch.bool).logical_not()
    if job.packed:
        job.check.require(
            bool(seen.any(-1).all()),
            "atten_mask",
            "a row of ones",
            "no row that hides every key (varlen)",
        )
    if mode == 0:
        seen = seen & band(queries, keys, job.pre_tokens, job.next_tokens, 0)
    return seen


def _statistics(query: Tensor, key: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    """Each row's maximal masked score, (S, N)."""
    keys = key.float().repeat_interleave(query.size(1) // key.size(1), dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if not scores.size(-1):
        return scores.new_full((query.size(0), query.size(1)), -torch.inf)
    return scores.amax(-1).transpose(0, 1)


def _arrange(job: Job, rows: Tensor, softmax_layout: str) -> Tensor:
    """softmax_max or softmax_sum, eight copies a row: (B, N, S, 8), or (T, N, 8) for TND.

    TND's default is documented as laid out NTD while the meta kernel says (T, N, 8): the shape
    is the meta kernel's, the order of the elements the document's.
    """
    if not job.packed:
        return rows.transpose(1, 2).unsqueeze(-1).repeat(1, 1, 1, 8)
    wide = rows.unsqueeze(-1).repeat(1, 1, 8)
    if softmax_layout == "TND":
        return wide
    return wide.transpose(0, 1).contiguous().view(wide.shape)


def _run(job: Job, spans: list[tuple[int, Span, Span]], softmax_layout: str) -> Result:
    """Attend sequence by sequence."""
    fill = contract.UNDEFINED_VALUE
    lead = job.query.shape[:-1]
    output = job.query.new_full((*lead, job.value.size(-1)), fill)
    top, total = (torch.full(lead, fill, dtype=torch.float32) for _ in range(2))
    for row, (q_start, q_size), (k_start, k_size) in spans:
        pick: Any = slice(None) if job.packed else row
        part, keys = slice(q_start, q_start + q_size), slice(k_start, k_start + k_size)
        query, key, value = job.query[pick][part], job.key[pick][keys], job.value[pick][keys]
        seen = _visible(job, row, q_size, k_size)
        result, lse = attend(query, key, value, job.scale, seen, 0.0)
        highest = _statistics(query, key, job.scale, seen)
        output[pick][part] = result.to(output.dtype)
        top[pick][part] = highest
        total[pick][part] = torch.exp(lse - highest).nan_to_num(0.0)
    maxima, sums = _arrange(job, top, softmax_layout), _arrange(job, total, softmax_layout)
    return _back(output, job.layout), maxima, sums, job.query.new_empty(0), 0, 0, 0


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = INT_MAX,
    next_tockens: int = INT_MAX,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> Result:
    """softmax(mask(scale * q k^T)) v without dropout; a mask's 1 hides. Lengths are cumulative.

    gen_mask_parallel and sync only order the making of a dropout mask, which there is none of.
    """
    given = dict(locals())
    check = Checker("npu_fusion_attention")
    check.refuse(given, REFUSED)
    check.choice("input_layout", input_layout, RANKS)
    check.choice("sparse_mode", sparse_mode, (0, 1, 2, 3, 4), (5, 6, 7, 8))
    check.choice("inner_precise", inner_precise, (0, 1, 2))
    check.choice("softmax_layout", softmax_layout, ("", "TND") if input_layout == "TND" else ("",))
    check.rank("query", query, RANKS[input_layout])
    for name in ("query", "key", "value"):
        check.dtype(name, given[name], FLOAT_TYPES)
        check.same_dtype(name, given[name], "query", query)
        check.rank(name, given[name], query.dim())
    kv_heads = head_num
    if input_layout in ("BSH", "SBH"):
        width = query.size(2) // head_num
        check.require(query.size(2) == width * head_num, "query", query.size(2), "H = N * D")
        check.require(key.size(2) % width == 0, "key", key.size(2), f"a multiple of D={width}")
        kv_heads = key.size(2) // width
    job = Job(
        check,
        _canonical(query, input_layout, head_num),
        _canonical(key, input_layout, kv_heads),
        _canonical(value, input_layout, kv_heads),
        input_layout,
        atten_mask,
        scale,
        pre_tockens,
        next_tockens,
        sparse_mode,
    )
    _check_shapes(job, head_num)
    spans = _spans(job, actual_seq_qlen, actual_seq_kvlen)
    longest = (
        max((q[1] for _, q, _ in spans), default=0),
        max((k[1] for _, _, k in spans), default=0),
    )
    _check_mask(job, longest)
    return _run(job, spans, softmax_layout)
