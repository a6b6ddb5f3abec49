"""Every kernel against an independent naive formula, and every checked constraint once."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.reference import KERNELS, SCHEMAS, ContractViolation, contract, install

SCALE = 0.09
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
Seen = Callable[[int, int], bool]


@pytest.fixture(scope="module", autouse=True)
def libraries() -> Iterator[list[torch.library.Library]]:
    """Torch knows the operators for the length of this module."""
    return install()


@pytest.fixture(autouse=True)
def switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts from the shipped switches and the same random numbers."""
    torch.manual_seed(0)
    monkeypatch.setattr(contract, "ALLOW_FLOAT32", True)
    monkeypatch.setattr(contract, "ENFORCE_ENUMERATED_SIZES", True)
    monkeypatch.setattr(contract, "UNDEFINED_VALUE", 0.0)


def op(name: str) -> Any:
    """The registered operator, through torch's dispatcher."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.npu, packet), overload or "default")


def fia(*args: Any, **kwargs: Any) -> Any:
    """Version 1 of the attention."""
    return op("npu_fused_infer_attention_score")(*args, **kwargs)


def naive(q: Tensor, k: Tensor, v: Tensor, seen: Seen = lambda i, j: True) -> tuple[Tensor, Tensor]:
    """Attention of one sequence (S, N, D) in scalar loops and doubles; output and lse."""
    group = q.size(1) // k.size(1)
    out = torch.zeros(q.size(0), q.size(1), v.size(2))
    sums = torch.full((q.size(0), q.size(1)), -math.inf)
    for i in range(q.size(0)):
        for h in range(q.size(1)):
            keys = [j for j in range(k.size(0)) if seen(i, j)]
            if not keys:
                continue
            scores = [float(q[i, h].double() @ k[j, h // group].double()) * SCALE for j in keys]
            top = max(scores)
            total = sum(math.exp(score - top) for score in scores)
            mixed = torch.zeros(v.size(2), dtype=torch.double)
            for j, score in zip(keys, scores, strict=True):
                mixed += math.exp(score - top) / total * v[j, h // group].double()
            out[i, h] = mixed
            sums[i, h] = top + math.log(total)
    return out, sums


def close(one: Tensor, other: Tensor) -> None:
    """Equal within float32's noise."""
    torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def causal(q: int, k: int) -> Seen:
    """The right-down triangle."""
    return lambda i, j: j <= i + k - q


def heads(
    total: int,
    n: int = 4,
    kv: int = 2,
    d: int = 128,
    q: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v as (T, N, D)."""
    return torch.randn(q or total, n, d), torch.randn(total, kv, d), torch.randn(total, kv, d)


def pages(
    rows: list[Tensor],
    size: int,
    spare: int = 2,
    four: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scatter sequences (S, N, D) over a shuffled block pool; the pool and the int32 table."""
    counts = [-(-len(row) // size) for row in rows]
    order = torch.randperm(sum(counts) + spare).tolist()
    n, d = rows[0].shape[1:]
    pool = torch.full((sum(counts) + spare, size, n, d), 1e4)
    table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    for index, row in enumerate(rows):
        for block in range(counts[index]):
            table[index, block] = order.pop()
            part = row[block * size : (block + 1) * size]
            pool[int(table[index, block]), : len(part)] = part
    return (pool.transpose(1, 2).contiguous() if four else pool.flatten(2)), table


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_signature_is_the_schema(name: str) -> None:
    """Names, order, defaults and keyword-only arguments are the schema's."""
    schema = torch._C.parse_schema(SCHEMAS[name])
    found = inspect.signature(KERNELS[name]).parameters.values()
    assert [p.name for p in found] == [a.name for a in schema.arguments]
    for parameter, argument in zip(found, schema.arguments, strict=True):
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        given = parameter.default is not parameter.empty
        assert given == argument.has_default_value(), argument.name
        assert not given or parameter.default == argument.default_value, argument.name


# ------------------------------------------------------------------ attention: TND


@pytest.mark.parametrize("d", [(128, 128), (192, 128)])
@pytest.mark.parametrize("mode", [0, 3])
def test_tnd_cumulative(d: tuple[int, int], mode: int) -> None:
    """TND without pages: both length lists cumulative; mode 3 is the right-down triangle."""
    q, k, v = torch.randn(6, 4, d[0]), torch.randn(12, 2, d[0]), torch.randn(12, 2, d[1])
    out, lse = fia(
        q,
        k,
        v,
        atten_mask=MASK if mode else None,
        actual_seq_lengths=[2, 2, 6],
        actual_seq_lengths_kv=[5, 5, 12],
        num_heads=4,
        num_key_value_heads=2,
        scale=SCALE,
        input_layout="TND",
        sparse_mode=mode,
        softmax_lse_flag=True,
    )
    for qs, ks in (((0, 2), (0, 5)), ((2, 6), (5, 12))):
        seen = causal(qs[1] - qs[0], ks[1] - ks[0]) if mode else lambda i, j: True
        want, sums = naive(q[slice(*qs)], k[slice(*ks)], v[slice(*ks)], seen)
        close(out[slice(*qs)], want)
        close(lse[slice(*qs), :, 0], sums)
    assert out.shape == (6, 4, d[1])


@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize("size", [16, 128])
def test_tnd_paged_lengths_are_per_sequence(four: bool, size: int) -> None:
    """TND with pages: queries cumulative, keys per sequence; both pool layouts."""
    lengths, queries = [5, 40, 17], [2, 1, 17]
    parts = [heads(length, q=count) for length, count in zip(lengths, queries, strict=True)]
    torch.manual_seed(1)
    key, table = pages([part[1] for part in parts], size, four=four)
    torch.manual_seed(1)
    value, _ = pages([part[2] for part in parts], size, four=four)
    out, lse = fia(
        torch.cat([part[0] for part in parts]),
        key,
        value,
        atten_mask=MASK.to(torch.int8),
        actual_seq_lengths=[2, 3, 20],
        actual_seq_lengths_kv=lengths,
        block_table=table,
        block_size=size,
        num_heads=4,
        num_key_value_heads=2,
        scale=SCALE,
        input_layout="TND",
        sparse_mode=3,
    )
    want = [naive(q, k, v, causal(len(q), len(k)))[0] for q, k, v in parts]
    close(out, torch.cat(want))
    assert lse.shape == (1,)
    assert lse.item() == 0


def test_tnd_band() -> None:
    """Sparse mode 4: the band around the right-down diagonal."""
    q, k, v = heads(9, q=5)
    out, _ = fia(
        q,
        k,
        v,
        atten_mask=MASK,
        actual_seq_lengths=[5],
        actual_seq_lengths_kv=[9],
        num_heads=4,
        num_key_value_heads=2,
        scale=SCALE,
        input_layout="TND",
        sparse_mode=4,
        pre_tokens=2,
        next_tokens=1,
    )
    close(out, naive(q, k, v, lambda i, j: -2 <= j - (i + 4) <= 1)[0])


def test_version_two_is_version_one() -> None:
    """The renamed arguments reach the same algorithm."""
    q, k, v = heads(9)
    one = fia(
        q,
        k,
        v,
        atten_mask=MASK,
        actual_seq_lengths=[4, 9],
        actual_seq_lengths_kv=[4, 9],
        num_heads=4,
        num_key_value_heads=2,
        scale=SCALE,
        input_layout="TND",
        sparse_mode=3,
        softmax_lse_flag=True,
    )
    two = op("npu_fused_infer_attention_score_v2")(
        q,
        k,
        v,
        atten_mask=MASK,
        actual_seq_qlen=[4, 9],
        actual_seq_kvlen=[4, 9],
        num_query_heads=4,
        num_key_value_heads=2,
        softmax_scale=SCALE,
        input_layout="TND",
        sparse_mode=3,
        return_softmax_lse=True,
    )
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


def test_against_torch() -> None:
    """A second yardstick: scaled_dot_product_attention."""
    q, k, v = heads(33)
    out, _ = fia(
        q,
        k,
        v,
        atten_mask=MASK,
        actual_seq_lengths=[33],
        actual_seq_lengths_kv=[33],
        num_heads=4,
        num_key_value_heads=2,
        scale=SCALE,
        input_layout="TND",
        sparse_mode=3,
    )
    a, b, c = (t.transpose(0, 1).repeat_interleave(4 // t.size(1), 0) for t in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True, scale=SCALE)
    close(out, want.transpose(0, 1))


# ------------------------------------------------------------------ attention: padded layouts


def lay(tensor: Tensor, layout: str) -> Tensor:
    """(B, S, N, D) in another layout."""
    if layout == "BSH":
        return tensor.flatten(2)
    return tensor.transpose(1, 2).contiguous() if layout.startswith("BNSD") else tensor


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize("mode", [0, 2, 3, 4])
def test_padded(layout: str, mode: int) -> None:
    """Per-sequence lengths; rows and keys beyond them do not count; sparse modes by lengths."""
    q, k, v = torch.randn(2, 5, 4, 32), torch.randn(2, 7, 2, 32), torch.randn(2, 7, 2, 32)
    q_lengths, k_lengths = [5, 3], [7, 6]
    out, lse = fia(
        *(lay(t, layout) for t in (q, k, v)),
        atten_mask=MASK if mode else None,
        actual_seq_lengths=q_lengths,
        actual_seq_lengths_kv=[*k_lengths, 99],
        num_heads=4,
        num_key_value_heads=2,
        scale=SCALE,
        input_layout=layout,
        sparse_mode=mode,
        pre_tokens=1,
        next_tokens=2,
        softmax_lse_flag=True,
    )
    assert lse.shape == (2, 4, 5, 1)
    want = torch.zeros(2, 5, 4, 32)
    for b, (n, m) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        seen: dict[int, Seen] = {
            0: lambda i, j: True,
            2: lambda i, j: j <= i,
            3: causal(n, m),
            4: lambda i, j, c=m - n: -1 <= j - i - c <= 2,  # type: ignore[misc]
        }
        want[b, :n], sums = naive(q[b, :n], k[b, :m], v[b, :m], seen[mode])
        close(lse[b, :, :n, 0].T, sums)
    close(out, want if layout == "BNSD_BSND" else lay(want, layout))


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (16, 16)])
@pytest.mark.parametrize("mode", [0, 1])
def test_full_mask(shape: tuple[int, ...], mode: int) -> None:
    """A full mask of every documented shape: 1 hides; mode 0 adds the band, mode 1 ignores it."""
    q, k, v = torch.randn(2, 4, 5, 32), torch.randn(2, 2, 7, 32), torch.randn(2, 2, 7, 32)
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    out, _ = fia(
        q,
        k,
        v,
        atten_mask=mask.to(torch.uint8),
        num_heads=4,
        num_key_value_heads=2,
        scale=SCALE,
        input_layout="BNSD",
        sparse_mode=mode,
        next_tokens=3,
    )
    for b in range(2):
        rows = mask.expand(2, *mask.shape[1:]) if mask.dim() == 4 else mask
        own = rows[b] if mask.dim() == 4 else rows
        own = own.reshape(own.shape[-2:])
        one, two, three = (t[b].transpose(0, 1) for t in (q, k, v))

        def seen(i: int, j: int, own: Tensor = own) -> bool:
            return not own[i, j] and (mode == 1 or j - i <= 3)

        want, _ = naive(one, two, three, seen)
        close(out[b].transpose(0, 1), want)


@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_paged_decode(layout: str) -> None:
    """One query a sequence over pages of 16; query lengths and sparse_mode 3 do not matter."""
    parts = [heads(length, q=1, d=64) for length in (3, 35)]
    torch.manual_seed(1)
    key, table = pages([part[1] for part in parts], 16)
    torch.manual_seed(1)
    value, _ = pages([part[2] for part in parts], 16)
    q = lay(torch.stack([part[0] for part in parts]), layout)
    for extra in ({}, {"sparse_mode": 3, "atten_mask": MASK, "actual_seq_lengths": [77, 88]}):
        out, _ = fia(
            q,
            key,
            value,
            actual_seq_lengths_kv=[3, 35],
            block_table=table,
            block_size=16,
            num_heads=4,
            num_key_value_heads=2,
            scale=SCALE,
            input_layout=layout,
            **extra,
        )
        want = torch.stack([naive(*part)[0] for part in parts])
        close(out, lay(want, layout))


def test_decode_mask_of_pages() -> None:
    """(B, KV_S) masks at Q_S = 1, wide enough for every page of the table."""
    parts = [heads(length, q=1, d=64) for length in (3, 35)]
    torch.manual_seed(1)
    key, table = pages([part[1] for part in parts], 16)
    torch.manual_seed(1)
    value, _ = pages([part[2] for part in parts], 16)
    mask = torch.zeros(2, 48, dtype=torch.bool)
    mask[1, :30] = True
    call: dict[str, Any] = {
        "actual_seq_lengths_kv": [3, 35],
        "block_table": table,
        "block_size": 16,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": SCALE,
        "input_layout": "BNSD",
    }
    q = lay(torch.stack([part[0] for part in parts]), "BNSD")
    out, _ = fia(q, key, value, atten_mask=mask, **call)
    want = [
        naive(*part, lambda i, j, own=row: not own[j])[0]  # type: ignore[misc]
        for part, row in zip(parts, mask, strict=True)
    ]
    close(out, lay(torch.stack(want), "BNSD"))
    with pytest.raises(ContractViolation, match="at least 48 columns"):
        fia(q, key, value, atten_mask=mask[:, :47].contiguous(), **call)


def test_rows_without_keys() -> None:
    """Mode 3 with more queries than keys and S2 = 0 give zeros; lse is -inf."""
    q, k, v = torch.randn(1, 4, 5, 32), torch.randn(1, 4, 3, 32), torch.randn(1, 4, 3, 32)
    out, lse = fia(
        q,
        k,
        v,
        atten_mask=MASK,
        num_heads=4,
        scale=SCALE,
        input_layout="BNSD",
        sparse_mode=3,
        softmax_lse_flag=True,
    )
    assert not out[:, :, :2].any()
    assert torch.isneginf(lse[:, :, :2]).all()
    assert out[:, :, 2:].all()
    out, _ = fia(q, k[:, :, :0], v[:, :, :0], num_heads=4, input_layout="BNSD")
    assert out.shape == q.shape
    assert not out.any()


def test_undefined_rows_can_be_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded query rows, and user-masked rows without the correction, take UNDEFINED_VALUE."""
    monkeypatch.setattr(contract, "UNDEFINED_VALUE", math.nan)
    q = torch.randn(2, 5, 4, 32)
    out, _ = fia(q, q, q, actual_seq_lengths=[5, 3], num_heads=4, input_layout="BSND")
    assert out[1, 3:].isnan().all()
    assert not out[1, :3].isnan().any()
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    for precise, lost in ((0, True), (2, False)):
        out, _ = fia(
            q, q, q, atten_mask=mask, num_heads=4, input_layout="BSND", inner_precise=precise
        )
        assert bool(out[:, 2].isnan().all()) == lost
        assert not out[:, :2].isnan().any()


@pytest.mark.parametrize("version", [1, 2])
def test_out_overload_and_graph_helpers(version: int) -> None:
    """What capture calls: workspace, infer_output, then .out, which returns what it was given."""
    q, k, v = heads(6)
    tail = "" if version == 1 else "_v2"
    names = (
        ["actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "softmax_lse_flag"]
        if version == 1
        else ["actual_seq_qlen", "actual_seq_kvlen", "num_query_heads", "return_softmax_lse"]
    )
    call = dict(zip(names, ([6], [6], 4, True), strict=True)) | {
        "num_key_value_heads": 2,
        "input_layout": "TND",
    }
    base = f"npu_fused_infer_attention_score{tail}"
    workspace = op(f"_{base}_get_max_workspace")(q, k, v, **call)
    kept = {name: call[name] for name in (*names[2:], "num_key_value_heads", "input_layout")}
    out = list(op(f"_{base}_infer_output")(q, v, **kept))
    assert workspace.dim() == 1
    assert workspace.dtype == q.dtype
    result = op(f"{base}.out")(q, k, v, **call, workspace=workspace, out=out)
    want = op(base)(q, k, v, **call)
    for got, mine, expected in zip(result, out, want, strict=True):
        assert got.data_ptr() == mine.data_ptr()
        assert torch.equal(mine, expected)
    with pytest.raises(ContractViolation, match=r"out\[0\]"):
        op(f"{base}.out")(q, k, v, **call, out=[out[0][:3], out[1]])
    with pytest.raises(ContractViolation, match="workspace"):
        op(f"{base}.out")(q, k, v, **call, workspace=workspace.half(), out=out)


PAGED: dict[str, Any] = {
    "actual_seq_lengths": [2, 3],
    "actual_seq_lengths_kv": [20, 5],
    "num_heads": 4,
    "num_key_value_heads": 2,
    "input_layout": "TND",
    "block_size": 16,
    "block_table": torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
    "sparse_mode": 3,
    "atten_mask": MASK,
}
BREAKS: list[tuple[str, dict[str, Any]]] = [
    ("block_table", {"block_table": PAGED["block_table"].long()}),
    ("block_table", {"block_table": PAGED["block_table"][0]}),
    ("block_table", {"block_table": torch.zeros(3, 2, dtype=torch.int32)}),
    ("block_table", {"block_table": torch.tensor([[0, 9], [2, 0]], dtype=torch.int32)}),
    ("block_table", {"block_table": torch.tensor([[0, -1], [2, 0]], dtype=torch.int32)}),
    ("actual_seq_lengths_kv", {"block_table": PAGED["block_table"][:, :1].contiguous()}),
    ("block_size", {"block_size": 0, "key": torch.zeros(4, 0, 256)}),
    ("key", {"block_size": 32}),
    ("block_size", {"block_size": 24, "key": torch.zeros(4, 24, 256)}),
    ("block_table", {"key": torch.zeros(2, 16, 256)}),
    ("key", {"key": torch.zeros(4, 2, 128, 16)}),
    ("key", {"key": torch.zeros(4, 32, 256)[:, ::2]}),
    ("key", {"key": torch.zeros(4, 16, 256, dtype=torch.float16)}),
    ("actual_seq_lengths", {"actual_seq_lengths": [2, 4]}),
    ("actual_seq_lengths", {"actual_seq_lengths": [2, 1]}),
    ("actual_seq_lengths", {"actual_seq_lengths": [-1, 3]}),
    ("actual_seq_lengths_kv", {"actual_seq_lengths_kv": None}),
    ("actual_seq_lengths_kv", {"actual_seq_lengths_kv": [20]}),
    ("actual_seq_lengths_kv", {"actual_seq_lengths_kv": [20, 33]}),
    ("actual_seq_lengths", {"actual_seq_lengths_kv": [20, 0]}),
    ("num_heads", {"num_heads": 0}),
    ("query", {"num_heads": 2}),
    ("num_key_value_heads", {"num_key_value_heads": 3}),
    ("query", {"query": torch.zeros(3, 4, 80), "key": torch.zeros(4, 16, 160)}),
    ("query", {"query": torch.zeros(3, 4, 64), "key": torch.zeros(4, 16, 128)}),
    ("query", {"query": torch.zeros(4, 3, 128).transpose(0, 1)}),
    ("query", {"query": torch.zeros(3, 4, 128, dtype=torch.float64)}),
    ("atten_mask", {"atten_mask": None}),
    ("atten_mask", {"atten_mask": MASK[:1024, :1024].contiguous()}),
    ("atten_mask", {"atten_mask": MASK.logical_not()}),
    ("atten_mask", {"atten_mask": MASK.float()}),
    ("atten_mask", {"atten_mask": MASK.T.contiguous().T}),
    ("atten_mask", {"sparse_mode": 0}),
    ("sparse_mode", {"sparse_mode": 2}),
    ("sparse_mode", {"sparse_mode": 5}),
    ("inner_precise", {"inner_precise": 4}),
    ("input_layout", {"input_layout": "SBH"}),
]


@pytest.mark.parametrize(("argument", "change"), BREAKS)
def test_paged_contract(argument: str, change: dict[str, Any]) -> None:
    """The unchanged call passes; each change names the argument that breaks the contract."""
    tensors = {"query": torch.randn(3, 4, 128), "key": torch.randn(4, 16, 256)}
    call = {**tensors, **PAGED, **change}
    with pytest.raises(ContractViolation) as caught:
        fia(call.pop("query"), call["key"], call.pop("key").clone(), **call)
    assert caught.value.argument == argument, str(caught.value)


def test_paged_contract_baseline() -> None:
    """The call the table above breaks is itself sound."""
    pool = torch.randn(4, 16, 256)
    assert fia(torch.randn(3, 4, 128), pool, pool.clone(), **PAGED)[0].shape == (3, 4, 128)


def test_prefill_pages_need_128() -> None:
    """Q_S > 1 outside TND: block_size 128 to 512 by 128; BSH takes three-dimensional pools only."""
    q, table = torch.randn(1, 3, 4 * 64), torch.zeros(1, 2, dtype=torch.int32)
    call: dict[str, Any] = {"actual_seq_lengths_kv": [5], "num_heads": 4, "block_table": table}
    for size, good in ((128, True), (16, False), (640, False)):
        pool = torch.randn(2, size, 256)
        if good:
            assert fia(q, pool, pool, block_size=size, **call)[0].shape == q.shape
        else:
            with pytest.raises(ContractViolation, match="block_size"):
                fia(q, pool, pool, block_size=size, **call)
    pool = torch.randn(2, 4, 128, 64)
    with pytest.raises(ContractViolation, match="key is 4-D"):
        fia(q, pool, pool, block_size=128, **call)


@pytest.mark.parametrize(
    "change",
    [
        {"query_rope": torch.zeros(1)},
        {"pse_shift": torch.zeros(1)},
        {"antiquant_mode": 1},
        {"kv_padding_size": torch.zeros(1)},
        {"key_shared_prefix": torch.zeros(1)},
        {"actual_shared_prefix_len": [1]},
        {"quant_scale2": torch.zeros(1)},
        {"sparse_mode": 9},
        {"input_layout": "TND_NTD"},
    ],
)
def test_unimplemented_is_named(change: dict[str, Any]) -> None:
    """A documented argument is never ignored."""
    q = torch.randn(3, 4, 128)
    call = {
        "num_heads": 4,
        "input_layout": "TND",
        "actual_seq_lengths": [3],
        "actual_seq_lengths_kv": [3],
    } | change
    with pytest.raises(NotImplementedError, match=next(iter(change))):
        fia(q, q, q, **call)


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 and toy head dims pass only while their switches say so."""
    toy = torch.randn(3, 4, 8)
    call: dict[str, Any] = {
        "num_heads": 4,
        "input_layout": "TND",
        "actual_seq_lengths": [3],
        "actual_seq_lengths_kv": [3],
    }
    with pytest.raises(ContractViolation, match="D=8"):
        fia(toy, toy, toy, **call)
    monkeypatch.setattr(contract, "ENFORCE_ENUMERATED_SIZES", False)
    assert fia(toy, toy, toy, **call)[0].shape == toy.shape
    monkeypatch.setattr(contract, "ALLOW_FLOAT32", False)
    with pytest.raises(ContractViolation, match="float32"):
        fia(toy, toy, toy, **call)
    assert fia(*[toy.bfloat16()] * 3, **call)[0].dtype == torch.bfloat16


# ------------------------------------------------------------------ scatter


def cache_case() -> dict[str, Any]:
    """Five tokens into three blocks of four."""
    return {
        "key": torch.randn(5, 2, 8),
        "value": torch.randn(5, 2, 6),
        "key_cache": torch.randn(3, 4, 2, 8),
        "value_cache": torch.randn(3, 4, 2, 6),
        "slot_mapping": torch.tensor([11, 0, 5, 4, 7], dtype=torch.int32),
        "cache_mode": "Norm",
    }


def test_scatter_pa_kv_cache() -> None:
    """Row by row into (block, offset), nothing else touched."""
    case = cache_case()
    want = {name: case[name].clone() for name in ("key_cache", "value_cache")}
    for index, slot in enumerate(case["slot_mapping"].tolist()):
        want["key_cache"][slot // 4, slot % 4] = case["key"][index]
        want["value_cache"][slot // 4, slot % 4] = case["value"][index]
    assert op("npu_scatter_pa_kv_cache")(**case) is None
    assert all(torch.equal(case[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 1, 2, 3, 12])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 1, 2, 3, -1])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 1, 2, 3, 3])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 1, 2, 3])}),
        ("slot_mapping", {"slot_mapping": torch.arange(5).float()}),
        ("key", {"key": torch.randn(5, 8, 2).transpose(1, 2)}),
        ("key_cache", {"key_cache": torch.randn(3, 4, 16)}),
        ("key_cache", {"key_cache": torch.randn(3, 4, 2, 8).half()}),
        ("value_cache", {"value_cache": torch.randn(3, 4, 2, 8)}),
        ("value_cache", {"value_cache": torch.randn(4, 4, 2, 6)}),
        ("value", {"value": torch.randn(4, 2, 6)}),
        ("cache_mode", {"cache_mode": "ND"}),
    ],
)
def test_scatter_pa_contract(argument: str, change: dict[str, Any]) -> None:
    """Each documented rule of the cache write."""
    with pytest.raises(ContractViolation) as caught:
        op("npu_scatter_pa_kv_cache")(**cache_case() | change)
    assert caught.value.argument == argument


def test_scatter_pa_unimplemented() -> None:
    """NZ pools (the default mode) and compression."""
    case = cache_case()
    with pytest.raises(NotImplementedError, match="cache_mode"):
        op("npu_scatter_pa_kv_cache")(**case | {"cache_mode": "PA_NZ"})
    with pytest.raises(NotImplementedError, match="seq_lens"):
        op("npu_scatter_pa_kv_cache")(**case | {"seq_lens": torch.tensor([1])})


@pytest.mark.parametrize("place", [True, False])
def test_scatter_nd_update(place: bool) -> None:
    """The document's own shapes: input (4, 5, 6), indices (3, 2), updates (3, 6)."""
    table, updates = torch.randn(4, 5, 6), torch.randn(3, 6)
    indices = torch.tensor([[0, 4], [3, 1], [2, 2]], dtype=torch.int32)
    want, before = table.clone(), table.clone()
    for row, (i, j) in enumerate(indices.tolist()):
        want[i, j] = updates[row]
    out = op("npu_scatter_nd_update_" if place else "npu_scatter_nd_update")(
        table, indices, updates
    )
    assert torch.equal(out, want)
    assert torch.equal(table, want if place else before)
    assert (out.data_ptr() == table.data_ptr()) == place


@pytest.mark.parametrize(
    ("argument", "indices", "updates"),
    [
        ("indices", torch.tensor([[0, 5]]), torch.zeros(1, 6)),
        ("indices", torch.tensor([[-1, 0]]), torch.zeros(1, 6)),
        ("indices", torch.tensor([0]), torch.zeros(5, 6)),
        ("indices", torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1)),
        ("indices", torch.zeros(1, 2), torch.zeros(1, 6)),
        ("updates", torch.tensor([[0, 1]]), torch.zeros(1, 5)),
        ("updates", torch.tensor([[0, 1]]), torch.zeros(1, 6).half()),
    ],
)
def test_scatter_nd_contract(argument: str, indices: Tensor, updates: Tensor) -> None:
    """Range, rank, dtype and shape."""
    with pytest.raises(ContractViolation) as caught:
        op("npu_scatter_nd_update_")(torch.zeros(4, 5, 6), indices, updates)
    assert caught.value.argument == argument


def test_scatter_nd_int32_table_is_not_listed() -> None:
    """int32 is not among the documented dtypes."""
    with pytest.raises(ContractViolation, match="int32"):
        op("npu_scatter_nd_update_")(
            torch.zeros(4, dtype=torch.int32),
            torch.zeros(1, 1).int(),
            torch.zeros(1, dtype=torch.int32),
        )


@pytest.mark.parametrize("place", [True, False])
def test_scatter_update(place: bool) -> None:
    """The document's example, with two batch rows."""
    data, updates = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 1, 4)
    want, before = data.clone(), data.clone()
    want[0, :, 1], want[1, :, 4] = updates[0, :, 0], updates[1, :, 0]
    out = op("scatter_update_" if place else "scatter_update")(
        data, torch.tensor([1, 4]), updates, -2
    )
    assert torch.equal(out, want)
    assert torch.equal(data, want if place else before)


# ------------------------------------------------------------------ norms, rope, activations


@pytest.mark.parametrize("gamma_dims", [1, 2])
def test_rms_norm(gamma_dims: int) -> None:
    """Plain loops; rstd keeps ones on the normalised axes."""
    x = torch.randn(2, 3, 4, 8)
    gamma = torch.randn(x.shape[4 - gamma_dims :])
    y, rstd = op("npu_rms_norm")(x, gamma, 1e-3)
    axes = tuple(range(4 - gamma_dims, 4))
    root = torch.sqrt((x.double() ** 2).sum(axes, keepdim=True) / gamma.numel() + 1e-3)
    close(y, (x / root * gamma).float())
    close(rstd, (1 / root).float())
    assert rstd.shape == (2, 3, 4 if gamma_dims == 1 else 1, 1)
    assert rstd.dtype == torch.float32


def test_add_rms_norm() -> None:
    """(y, rstd, x1 + x2), x being the sum in its own dtype."""
    x1, x2, gamma = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    y, rstd, x = op("npu_add_rms_norm")(x1, x2, gamma)
    assert torch.equal(x, x1 + x2)
    want = x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt()
    close(y, want * gamma)
    half = op("npu_add_rms_norm")(x1.bfloat16(), x2.bfloat16(), gamma.bfloat16())
    assert [t.dtype for t in half] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert half[1].shape == (5, 1) == rstd.shape


def test_norm_contract() -> None:
    """gamma's shape and dtype, x2's shape."""
    x = torch.randn(5, 16)
    with pytest.raises(ContractViolation, match="gamma"):
        op("npu_rms_norm")(x, torch.randn(8))
    with pytest.raises(ContractViolation, match="gamma"):
        op("npu_rms_norm")(x, torch.randn(16).half())
    assert op("npu_rms_norm")(x.half(), torch.randn(16))[0].dtype == torch.float16
    with pytest.raises(ContractViolation, match="gamma"):
        op("npu_add_rms_norm")(x.half(), x.half(), torch.randn(16))
    with pytest.raises(ContractViolation, match="x2"):
        op("npu_add_rms_norm")(x, x[:4], torch.randn(16))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, half: bool = True) -> Tensor:
    """Element by element: partner i +- D/2 (half) or the neighbour (interleave)."""
    out, d = torch.empty_like(x), x.size(-1)
    for i in range(d):
        if half:
            partner, sign = ((i + d // 2), -1) if i < d // 2 else (i - d // 2, 1)
        else:
            partner, sign = (i + 1, -1) if i % 2 == 0 else (i - 1, 1)
        out[..., i] = x[..., i] * cos[..., i] + sign * x[..., partner] * sin[..., i]
    return out


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("table", [(1, 5, 1, 16), (1, 1, 3, 16), (2, 1, 1, 16)])
def test_rotary_mul(mode: str, table: tuple[int, ...]) -> None:
    """Both modes under every broadcast they share, and through the rotate matrix."""
    x, r1, r2 = torch.randn(2, 5, 3, 16), torch.rand(table), torch.rand(table)
    want = rotated(x, r1.expand_as(x), r2.expand_as(x), mode == "half")
    close(op("npu_rotary_mul")(x, r1, r2, mode), want)
    matrix = torch.zeros(16, 16)
    for i in range(16):
        unit = torch.zeros(1, 16)
        unit[0, i] = 1
        matrix[i] = rotated(unit, torch.zeros(1, 16), torch.ones(1, 16), mode == "half")[0]
    close(op("npu_rotary_mul")(x, r1, r2, mode, matrix), want)


def test_rotary_mul_contract() -> None:
    """Mode, rank, r1's shape and range, and the limit of 1000 on B and N."""
    x, r = torch.randn(2, 5, 3, 16), torch.rand(1, 5, 1, 16)
    for argument, call in (
        ("rotary_mode", (x, r, r, "quarter")),
        ("input", (x[0], r, r)),
        ("r1", (x, r * 3, r)),
        ("r2", (x, r, r[:, :1])),
        ("r1", (x, r[:, :2], r[:, :2])),
        ("r1", (x, r.expand(2, 5, 1, 16), r.expand(2, 5, 1, 16), "interleave")),
        ("input", (x[..., :15], r[..., :15], r[..., :15])),
        (
            "r1",
            (
                torch.randn(1200, 1, 3, 16),
                torch.rand(1200, 1, 3, 16),
                torch.rand(1200, 1, 3, 16),
                "interleave",
            ),
        ),
    ):
        with pytest.raises(ContractViolation) as caught:
            op("npu_rotary_mul")(*call)
        assert caught.value.argument == argument


@pytest.mark.parametrize(("layout", "lead"), [("BSND", (2, 3)), ("TND", (6,))])
@pytest.mark.parametrize("d", [64, 128])
def test_apply_rotary_pos_emb(layout: str, lead: tuple[int, ...], d: int) -> None:
    """The results, and that query and key themselves now hold them."""
    q, k = torch.randn(*lead, 4, d), torch.randn(*lead, 2, d)
    cos, sin = torch.rand(*lead, 1, d), torch.rand(*lead, 1, d)
    want = [rotated(x, cos.expand_as(x), sin.expand_as(x)) for x in (q, k)]
    out = op("npu_apply_rotary_pos_emb")(q, k, cos, sin, layout)
    for result, given, expected in zip(out, (q, k), want, strict=True):
        close(result, expected)
        assert torch.equal(result, given)


def test_apply_rotary_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts, modes, head dims, shapes and dtypes of the A2/A3 rules."""
    q, k, c = torch.randn(6, 4, 64), torch.randn(6, 2, 64), torch.rand(6, 1, 64)
    apply = op("npu_apply_rotary_pos_emb")
    for layout, mode in (("BNSD", "half"), ("TND", "interleave")):
        with pytest.raises(NotImplementedError):
            apply(q, k, c, c, layout, mode)
    for argument, call in (
        ("query", (q, k, c, c, "BSND")),
        ("layout", (q, k, c, c, "NTD")),
        ("rotary_mode", (q, k, c, c, "TND", "full")),
        ("key", (q, k[:5], c, c, "TND")),
        ("cos", (q, k, c.expand(6, 4, 64), c, "TND")),
        ("sin", (q, k, c, c[:5], "TND")),
        ("cos", (q, k, c.half(), c, "TND")),
        ("query", (q[:0], k[:0], c[:0], c[:0], "TND")),
        ("query", (*(t[..., :32] for t in (q, k, c, c)), "TND")),
    ):
        with pytest.raises(ContractViolation) as caught:
            apply(*call)
        assert caught.value.argument == argument
    monkeypatch.setattr(contract, "ENFORCE_ENUMERATED_SIZES", False)
    apply(*(t[..., :32] for t in (q, k, c, c)), "TND")


def test_mrope_as_rope() -> None:
    """One-dimensional positions, partial rotation, both rotary modes."""
    positions = torch.tensor([3, 0, 9, 9, 1])
    q, k, table = torch.randn(5, 4 * 64), torch.randn(5, 2 * 64), torch.randn(10, 32)
    for mode in ("half", "interleave", "interleaved"):
        out = op("npu_mrope")(positions, q, k, table, 64, rotary_mode=mode)
        for x, result in ((q, out[0]), (k, out[1])):
            heads_of = x.view(5, -1, 64)
            cos, sin = (table[positions][:, None, part] for part in (slice(16), slice(16, 32)))
            pair = (
                (lambda t: torch.cat((t, t), -1))
                if mode == "half"
                else (lambda t: t.repeat_interleave(2, -1))
            )
            turned = rotated(
                heads_of[..., :32],
                pair(cos).expand(5, x.size(1) // 64, 32),
                pair(sin).expand(5, x.size(1) // 64, 32),
                mode == "half",
            )
            close(result, torch.cat((turned, heads_of[..., 32:]), -1).flatten(1))


@pytest.mark.parametrize(
    ("sections", "mode"),
    [([16, 24, 24], "default"), ([24, 20, 20], "interleave"), ([16, 16, 16, 16], "default")],
)
def test_mrope_sections(sections: list[int], mode: str) -> None:
    """Which row of positions each of the rotary/2 frequencies reads."""
    positions = torch.randint(0, 10, (len(sections), 5))
    q, k, table = torch.randn(5, 256), torch.randn(5, 128), torch.randn(10, 128)
    out = op("npu_mrope")(positions, q, k, table, 128, mrope_section=sections, cache_mode=mode)
    for x, result in ((q, out[0]), (k, out[1])):
        for token in range(5):
            cos, sin = torch.empty(64), torch.empty(64)
            for f in range(64):
                if mode == "default":
                    row = next(i for i in range(len(sections)) if f < sum(sections[: i + 1]))
                else:
                    row = f % 3 if f < 3 * sections[1] else 0
                cos[f] = table[positions[row, token], f]
                sin[f] = table[positions[row, token], 64 + f]
            heads_of = x[token].view(-1, 128)
            want = rotated(
                heads_of,
                torch.cat((cos, cos)).expand_as(heads_of),
                torch.cat((sin, sin)).expand_as(heads_of),
            )
            close(result[token], want.flatten())


def test_mrope_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges, section sums, multiples, modes."""
    p = torch.zeros(5, dtype=torch.int64)
    q, k, t = torch.randn(5, 256), torch.randn(5, 128), torch.randn(10, 128)
    mrope = op("npu_mrope")
    for argument, args, kwargs in (
        ("positions", (p + 10, q, k, t, 128), {}),
        ("positions", (p.float(), q, k, t, 128), {}),
        ("positions", (p.expand(3, 5), q, k, t, 128), {}),
        ("positions", (p, q, k, t, 128), {"mrope_section": [16, 24, 24]}),
        ("mrope_section", (p.expand(3, 5), q, k, t, 128), {"mrope_section": [8, 12, 12]}),
        ("mrope_section", (p.expand(3, 5), q, k, t, 128), {"mrope_section": [24, 24, 16]}),
        ("query", (p, q[:, :200], k, t, 128), {}),
        ("cos_sin_cache", (p, q, k, t, 64), {}),
        ("cos_sin_cache", (p, q, k, t.half(), 128), {}),
        ("cache_mode", (p, q, k, t, 128), {"cache_mode": "interleave"}),
        ("rotary_mode", (p, q, k, t, 128), {"rotary_mode": "full"}),
    ):
        with pytest.raises(ContractViolation) as caught:
            mrope(*args, **kwargs)
        assert caught.value.argument == argument, str(caught.value)
    monkeypatch.setattr(contract, "ENFORCE_ENUMERATED_SIZES", False)
    with pytest.raises(NotImplementedError, match="mrope_section"):
        mrope(p.expand(3, 5), q, k, t, 128, mrope_section=[16, 20, 28], cache_mode="interleave")


def test_swiglu() -> None:
    """silu of the first half times the second, along any axis."""
    x = torch.randn(3, 6, 4)
    close(op("npu_swiglu")(x), torch.nn.functional.silu(x[..., :2]) * x[..., 2:])
    close(op("npu_swiglu")(x, 1), torch.nn.functional.silu(x[:, :3]) * x[:, 3:])
    with pytest.raises(ContractViolation, match="input"):
        op("npu_swiglu")(x, 0)


# ------------------------------------------------------------------ sampling and the rest


def filtered(row: list[float], p: float | None, k: int | None) -> list[float]:
    """Top-k then top-p over one row, with Python's sort."""
    order = sorted(range(len(row)), key=lambda i: row[i])
    kept = set(order)
    if k is not None:
        least = row[order[len(row) - k]]
        kept = {i for i in order if row[i] >= least}
    if p is not None:
        top = max(row)
        weights = {i: math.exp(row[i] - top) for i in kept}
        total, running, survivors = sum(weights.values()), 0.0, {order[-1]}
        for i in (i for i in order if i in kept):
            running += weights[i] / total
            if running > 1 - p:
                survivors.add(i)
        kept &= survivors
    return [value if i in kept else -math.inf for i, value in enumerate(row)]


@pytest.mark.parametrize("use", [(True, True), (True, False), (False, True)])
def test_top_k_top_p(use: tuple[bool, bool]) -> None:
    """Against the loop, ties included."""
    logits = torch.randn(6, 50).mul(4).round().div(2)
    p = torch.tensor([0.0, 0.31, 0.5, 0.77, 0.93, 1.0])
    k = torch.tensor([1, 50, 7, 3, 20, 5], dtype=torch.int32)
    out = op("npu_top_k_top_p")(logits, p if use[0] else None, k if use[1] else None)
    for row in range(6):
        want = filtered(
            logits[row].tolist(), float(p[row]) if use[0] else None, int(k[row]) if use[1] else None
        )
        assert out[row].tolist() == want, row


def test_top_k_keeps_ties() -> None:
    """Every value equal to the k-th largest stays; p = 0 still keeps one element."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    out = op("npu_top_k_top_p")(logits, k=torch.tensor([1], dtype=torch.int32))
    assert out.tolist() == [[-math.inf, 2.0, 2.0, -math.inf]]
    out = op("npu_top_k_top_p")(torch.zeros(1, 2), torch.tensor([0.5]))
    assert out.tolist() == [[-math.inf, 0.0]]  # 0.5 <= 1 - 0.5: the boundary falls out
    out = op("npu_top_k_top_p")(logits, torch.tensor([0.0]))
    assert out.tolist() == [[-math.inf, -math.inf, 2.0, -math.inf]]


def test_top_k_top_p_contract() -> None:
    """Ranges, dtypes, shapes, and not both absent."""
    logits, p = torch.randn(2, 2000), torch.tensor([0.5, 0.5])
    k = torch.tensor([5, 5], dtype=torch.int32)
    for argument, given in (
        ("p", {}),
        ("p", {"p": p * 3}),
        ("p", {"p": p.half()}),
        ("p", {"p": p[:1]}),
        ("k", {"k": k.long()}),
        ("k", {"k": k * 0}),
        ("k", {"k": k * 205}),
        ("k", {"k": k[:1]}),
    ):
        with pytest.raises(ContractViolation) as caught:
            op("npu_top_k_top_p")(logits, **given)
        assert caught.value.argument == argument
    with pytest.raises(ContractViolation, match=r"\[1, 4\]"):
        op("npu_top_k_top_p")(logits[:, :4], k=k)


def test_format_cast_and_prefetch() -> None:
    """Values pass through; other formats and bad sizes do not."""
    x = torch.randn(4, 8)
    for number in (2, 29):
        assert torch.equal(op("npu_format_cast")(x, number), x)
        assert op("npu_format_cast_.acl_format")(x, number).data_ptr() == x.data_ptr()
    with pytest.raises(NotImplementedError, match="acl_format"):
        op("npu_format_cast")(x, 3)
    with pytest.raises(NotImplementedError, match="customize_dtype"):
        op("npu_format_cast")(x, 29, customize_dtype=1)
    assert op("npu_prefetch")(x, None, 1 << 20) is None
    for call in ((0, 0), (8, -1), (8, 128)):
        with pytest.raises(ContractViolation):
            op("npu_prefetch")(x, x, *call)


# ------------------------------------------------------------------ fusion attention


@pytest.mark.parametrize("mode", [0, 2, 3, 4])
def test_fusion_attention_tnd(mode: int) -> None:
    """Cumulative lengths, a switched-off batch at the tail, the softmax statistics."""
    q, k, v = heads(9, n=4, kv=4, d=24, q=7)
    result = op("npu_fusion_attention")(
        q,
        k,
        v,
        4,
        "TND",
        atten_mask=MASK if mode else None,
        scale=SCALE,
        sparse_mode=mode,
        pre_tockens=2,
        next_tockens=1,
        actual_seq_qlen=[3, 7, 0],
        actual_seq_kvlen=[5, 9, 0],
        softmax_layout="TND",
    )
    for qs, ks in (((0, 3), (0, 5)), ((3, 7), (5, 9))):
        n, m = qs[1] - qs[0], ks[1] - ks[0]
        seen: dict[int, Seen] = {
            0: lambda i, j: True,
            2: lambda i, j: j <= i,
            3: causal(n, m),
            4: lambda i, j, c=m - n: -2 <= j - i - c <= 1,
        }  # type: ignore[misc]
        want, sums = naive(q[slice(*qs)], k[slice(*ks)], v[slice(*ks)], seen[mode])
        close(result[0][slice(*qs)], want)
        top, total = (t[slice(*qs), :, 3] for t in result[1:3])
        close(top + total.log(), sums)
    assert result[1].shape == (7, 4, 8)
    assert result[4:] == (0, 0, 0)


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize("shape", [(5, 6), (1, 1, 5, 6), (2, 1, 5, 6), (2, 4, 5, 6)])
def test_fusion_attention_mask(layout: str, shape: tuple[int, ...]) -> None:
    """Full masks in every layout."""
    q, k, v = torch.randn(2, 5, 4, 24), torch.randn(2, 6, 2, 24), torch.randn(2, 6, 2, 24)
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False

    def laid(t: Tensor) -> Tensor:
        return t.transpose(0, 1).flatten(2).contiguous() if layout == "SBH" else lay(t, layout)

    out = op("npu_fusion_attention")(
        laid(q), laid(k), laid(v), 4, layout, atten_mask=mask, scale=SCALE
    )
    whole = mask.expand(2, 4, 5, 6)
    want = torch.empty_like(q)
    for b in range(2):
        for h in range(4):
            kv = slice(h // 2, h // 2 + 1)

            def seen(i: int, j: int, own: Tensor = whole[b, h]) -> bool:
                return not own[i, j]

            one, _ = naive(q[b, :, h : h + 1], k[b, :, kv], v[b, :, kv], seen)
            want[b, :, h : h + 1] = one
    close(out[0], laid(want))
    assert out[1].shape == (2, 4, 5, 8)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("actual_seq_qlen", {"actual_seq_qlen": None}),
        ("actual_seq_qlen", {"actual_seq_qlen": [3, 6]}),
        ("actual_seq_kvlen", {"actual_seq_kvlen": [9]}),
        ("head_num", {"head_num": 2}),
        ("atten_mask", {"atten_mask": torch.ones(4, 5).bool()}),
        ("atten_mask", {"atten_mask": torch.zeros(1, 4, 5).bool()}),
        ("atten_mask", {"atten_mask": MASK.logical_not(), "sparse_mode": 3}),
        ("input_layout", {"input_layout": "NTD"}),
    ],
)
def test_fusion_attention_contract(argument: str, change: dict[str, Any]) -> None:
    """Lengths, heads, masks, layouts."""
    q, k, v = heads(9, n=4, kv=4, d=24, q=7)
    call = {
        "head_num": 4,
        "input_layout": "TND",
        "actual_seq_qlen": [3, 7],
        "actual_seq_kvlen": [5, 9],
    } | change
    with pytest.raises(ContractViolation) as caught:
        op("npu_fusion_attention")(q, k, v, **call)
    assert caught.value.argument == argument, str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"keep_prob": 0.5},
        {"pse": torch.zeros(1)},
        {"prefix": [1]},
        {"sink": torch.zeros(4)},
        {"sparse_mode": 7},
    ],
)
def test_fusion_attention_unimplemented(change: dict[str, Any]) -> None:
    """Named, not ignored."""
    q = torch.randn(3, 4, 24)
    with pytest.raises(NotImplementedError, match=next(iter(change))):
        op("npu_fusion_attention")(
            q, q, q, 4, "TND", actual_seq_qlen=[3], actual_seq_kvlen=[3], **change
        )


# ------------------------------------------------------------------ experts


ROUTING: dict[str, Any] = {
    "expert_num": 7,
    "expert_tokens_num_type": 1,
    "expert_tokens_num_flag": True,
    "active_expert_range": [0, 7],
}


def routing(x: Tensor, ids: Tensor, **change: Any) -> Any:
    """The routing of all rows, but for what is changed."""
    given = {"active_num": ids.numel()} | ROUTING | change
    return op("npu_moe_init_routing_v2")(x, ids, **given)


def ragged() -> tuple[Tensor, Tensor]:
    """Rows, and three experts for each: expert 2 idle, ties within and across rows."""
    x = torch.randn(5, 4)
    ids = [[4, 0, 4], [3, 4, 0], [6, 6, 1], [0, 5, 4], [4, 3, 3]]
    return x, torch.tensor(ids, dtype=torch.int32)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("bounds", [[0, 7], [], [1, 5], [2, 3], [4, 7]])
@pytest.mark.parametrize("row_idx_type", [0, 1])
def test_routing(kind: torch.dtype, bounds: list[int], row_idx_type: int) -> None:
    """Expert by expert, each reading the flat ids from the left: that is the stable order."""
    x, ids = ragged()
    x = (10 * x).to(kind)
    flat = ids.flatten().tolist()
    experts = range(*(bounds or [0, 7]))
    places = [at for expert in experts for at in range(15) if flat[at] == expert]
    expanded, rows, counts, scales = routing(
        x, ids, active_expert_range=bounds, row_idx_type=row_idx_type
    )
    assert expanded.shape == (15, 4)
    assert expanded.dtype == kind
    for place, at in enumerate(places):
        assert torch.equal(expanded[place], x[at // 3])
    assert not expanded[len(places) :].any()
    assert rows.dtype == torch.int32
    if row_idx_type == 1:
        undefined = [torch.iinfo(torch.int32).max] * (15 - len(places))
        assert rows.tolist() == places + undefined
    else:
        assert rows.tolist() == [places.index(at) if at in places else -1 for at in range(15)]
    assert counts.dtype == torch.int64
    assert counts.tolist() == [flat.count(expert) for expert in experts]
    assert scales.shape == (15,)
    assert scales.dtype == torch.float32


def test_routing_is_stable() -> None:
    """Ties keep the order of the flat positions, however many there are."""
    ids = torch.zeros(300, 2, dtype=torch.int32)
    _, rows, counts, _ = routing(torch.randn(300, 2), ids, row_idx_type=1)
    assert rows.tolist() == list(range(600))
    assert counts.tolist() == [600, 0, 0, 0, 0, 0, 0]


def test_routing_of_nothing() -> None:
    """No rows at all, and rows of which no expert is active."""
    expanded, rows, counts, _ = routing(torch.randn(0, 4), torch.zeros(0, 2, dtype=torch.int32))
    assert (expanded.shape, rows.shape, counts.tolist()) == ((0, 4), (0,), [0] * 7)
    x, ids = ragged()
    _, rows, counts, _ = routing(x, ids, active_expert_range=[2, 3])
    assert rows.tolist() == [-1] * 15
    assert counts.tolist() == [0]


def test_routing_undefined_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no document defines holds UNDEFINED_VALUE: rows of idle experts, all scales."""
    monkeypatch.setattr(contract, "UNDEFINED_VALUE", math.nan)
    x, ids = ragged()
    expanded, _, counts, scales = routing(x, ids, active_expert_range=[1, 5])
    assert expanded[int(counts.sum()) :].isnan().all()
    assert not expanded[: int(counts.sum())].isnan().any()
    assert scales.isnan().all()


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x", {"x": torch.randn(5, 2, 2)}),
        ("x", {"x": torch.zeros(5, 4, dtype=torch.int32)}),
        ("expert_idx", {"expert_idx": torch.zeros(15, dtype=torch.int32)}),
        ("expert_idx", {"expert_idx": torch.zeros(5, 3, dtype=torch.int64)}),
        ("expert_idx", {"expert_idx": torch.zeros(3, 5, dtype=torch.int32)}),
        ("expert_idx", {"expert_num": 6, "active_expert_range": [0, 6]}),
        ("expert_idx", {"expert_idx": torch.full((5, 3), -1, dtype=torch.int32)}),
        ("offset", {"offset": torch.zeros(1)}),
        ("active_num", {"active_num": 14}),
        ("active_num", {"active_num": -1}),
        ("expert_num", {"expert_num": 0}),
        ("expert_num", {"expert_num": 10241}),
        ("drop_pad_mode", {"drop_pad_mode": 2}),
        ("expert_tokens_num_type", {"expert_tokens_num_type": 3}),
        ("quant_mode", {"quant_mode": -2}),
        ("active_expert_range", {"active_expert_range": [0, 8]}),
        ("active_expert_range", {"active_expert_range": [-1, 7]}),
        ("active_expert_range", {"active_expert_range": [3, 3]}),
        ("active_expert_range", {"active_expert_range": [0, 3, 7]}),
        ("row_idx_type", {"row_idx_type": -1}),
    ],
)
def test_routing_contract(argument: str, change: dict[str, Any]) -> None:
    """Ranks, dtypes, shapes, ids, ranges, modes."""
    x, ids = ragged()
    call = {"x": x, "expert_idx": ids} | change
    with pytest.raises(ContractViolation) as caught:
        routing(call.pop("x"), call.pop("expert_idx"), **call)
    assert caught.value.argument == argument, str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": torch.zeros(5)},
        {"quant_mode": 0},
        {"quant_mode": 1},
        {"drop_pad_mode": 1},
        {"expert_tokens_num_type": 0},
        {"expert_tokens_num_type": 2},
        {"expert_tokens_num_flag": False},
        {"x_dtype": 1},
    ],
)
def test_routing_unimplemented(change: dict[str, Any]) -> None:
    """Named, not ignored."""
    with pytest.raises(NotImplementedError, match=next(iter(change))):
        routing(*ragged(), **change)


def grouped(left: Tensor, right: Tensor, sizes: list[int], **change: Any) -> Any:
    """The product by groups of these sizes, but for what is changed."""
    given = {
        "x": [left],
        "weight": [right],
        "group_list": torch.tensor(sizes),
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 2,
    } | change
    return op("npu_grouped_matmul")(given.pop("x"), given.pop("weight"), **given)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("split_item", [2, 3])
@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 9, 0, 0], [9, 0, 0, 0], [0, 0, 2, 7]])
def test_grouped(kind: torch.dtype, turned: bool, split_item: int, sizes: list[int]) -> None:
    """Row by row against dot products in doubles; sizes and running sums say the same."""
    x = torch.randn(9, 6).to(kind)
    weight = torch.randn(4, 5, 6).transpose(1, 2) if turned else torch.randn(4, 6, 5)
    weight = weight.to(kind)
    assert weight.is_contiguous() != turned
    owner = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    want = torch.empty(9, 5, dtype=torch.double)
    for row, expert in enumerate(owner):
        for column in range(5):
            terms = zip(x[row].tolist(), weight[expert, :, column].tolist(), strict=True)
            want[row, column] = math.fsum(one * other for one, other in terms)
    sums = [sum(sizes[: index + 1]) for index in range(4)]
    for form, numbers in ((1, sizes), (0, sums)):
        (y,) = grouped(
            x,
            weight,
            [],
            split_item=split_item,
            group_list=torch.tensor(numbers),
            group_list_type=form,
        )
        assert y.dtype == kind
        step = torch.finfo(kind).eps
        torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=max(step, 1e-5))


def test_grouped_rounds_once() -> None:
    """256 and 256 ones, a sum that bfloat16 would lose on the way."""
    x = torch.ones(2, 257, dtype=torch.bfloat16)
    weight = torch.ones(2, 257, 1, dtype=torch.bfloat16)
    weight[:, 0] = 256
    (y,) = grouped(x, weight, [1, 1])
    assert y.tolist() == [[512.0], [512.0]]


def test_grouped_edges() -> None:
    """One group by its running sum, no rows at all, 1024 groups, a wide transposed N."""
    x, weight = torch.randn(4, 3), torch.randn(1, 3, 2)
    (y,) = grouped(x, weight, [4], group_list_type=0)
    close(y, x @ weight[0])
    (y,) = grouped(x[:0], weight.expand(2, 3, 2).contiguous(), [0, 0])
    assert y.shape == (0, 2)
    sizes = [0] * 1024
    sizes[1000] = 4
    many = torch.randn(1024, 3, 2)
    close(grouped(x, many, sizes)[0], x @ many[1000])
    wide = torch.randn(2, 65536, 3).transpose(1, 2)
    assert grouped(x, wide, [1, 3])[0].shape == (4, 65536)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x", {"x": []}),
        ("x", {"x": [torch.randn(9, 6)] * 129}),
        ("x", {"x": [torch.randn(1, 9, 6)]}),
        ("x", {"x": [torch.randn(6, 9).t()]}),
        ("x", {"x": [torch.zeros(9, 6, dtype=torch.int64)]}),
        ("x", {"x": [torch.randn(9, 65536)], "weight": [torch.randn(3, 65536, 1)]}),
        ("weight", {"weight": []}),
        ("weight", {"weight": [torch.randn(6, 5)]}),
        ("weight", {"weight": [torch.randn(3, 7, 5)]}),
        ("weight", {"weight": [torch.randn(3, 6, 5).half()]}),
        ("weight", {"weight": [torch.zeros(3, 6, 5, dtype=torch.int64)]}),
        ("weight", {"weight": [torch.randn(3, 6, 10)[..., ::2]]}),
        ("weight", {"weight": [torch.randn(3, 6, 65536)]}),
        ("group_list", {"group_list": None}),
        ("group_list", {"group_list": torch.tensor([4, 0, 5], dtype=torch.int32)}),
        ("group_list", {"group_list": torch.tensor([[4, 0, 5]])}),
        ("group_list", {"group_list": torch.tensor([4, 5])}),
        ("group_list", {"group_list": torch.tensor([4, 0, 4])}),
        ("group_list", {"group_list": torch.tensor([4, -1, 6])}),
        ("group_list", {"group_list": torch.tensor([5, 4, 9]), "group_list_type": 0}),
        ("group_list", {"group_list": torch.tensor([-1, 4, 9]), "group_list_type": 0}),
        ("group_list", {"group_list": torch.tensor([4, 4, 8]), "group_list_type": 0}),
        ("group_list", {"group_list": torch.tensor([9]), "weight": [torch.randn(1, 6, 5)]}),
        (
            "group_list",
            {
                "group_list": torch.tensor([9] + [0] * 1024),
                "weight": [torch.randn(1025, 6, 5)],
            },
        ),
        ("offset", {"offset": [torch.zeros(5)]}),
        ("activation_input", {"activation_input": [torch.zeros(5)]}),
        ("activation_quant_scale", {"activation_quant_scale": [torch.zeros(5)]}),
        ("activation_quant_offset", {"activation_quant_offset": [torch.zeros(5)]}),
        ("split_item", {"split_item": 4}),
        ("group_type", {"group_type": None}),
        ("group_type", {"group_type": 1}),
        ("group_list_type", {"group_list_type": 2}),
        ("act_type", {"act_type": 5}),
        ("tuning_config", {"tuning_config": [4]}),
    ],
)
def test_grouped_contract(argument: str, change: dict[str, Any]) -> None:
    """Ranks, dtypes, strides, inner axes, the group list, modes."""
    with pytest.raises(ContractViolation) as caught:
        grouped(torch.randn(9, 6), torch.randn(3, 6, 5), [4, 0, 5], **change)
    assert caught.value.argument == argument, str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"x": [torch.randn(9, 6)] * 2},
        {"x": [torch.zeros(9, 6, dtype=torch.int8)]},
        {"weight": [torch.randn(6, 5)] * 3},
        {"weight": [torch.zeros(3, 6, 5, dtype=torch.int8)]},
        {"bias": [torch.zeros(3, 5)]},
        {"scale": [torch.zeros(5)]},
        {"antiquant_scale": [torch.zeros(3, 5)]},
        {"antiquant_offset": [torch.zeros(3, 5)]},
        {"per_token_scale": [torch.zeros(9)]},
        {"output_dtype": 1},
        {"x_dtype": 1},
        {"weight_dtype": 1},
        {"scale_dtype": 1},
        {"per_token_scale_dtype": 1},
        {"split_item": 0},
        {"group_type": -1},
        {"group_type": 2},
    ],
)
def test_grouped_unimplemented(change: dict[str, Any]) -> None:
    """Named, not ignored."""
    with pytest.raises(NotImplementedError, match=next(iter(change))):
        grouped(torch.randn(9, 6), torch.randn(3, 6, 5), [4, 0, 5], **change)


# ------------------------------------------------------------------ shapes without data


def shapes(result: Any) -> list[Any]:
    """Shapes and dtypes of whatever an operator returned."""
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [(p.shape, p.dtype) if isinstance(p, Tensor) else p for p in parts]


def meta_cases() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """One sound call of most operators."""
    q, k, v = torch.randn(6, 4, 128), torch.randn(6, 2, 128), torch.randn(6, 2, 128)
    one = {
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "actual_seq_lengths": [6],
        "actual_seq_lengths_kv": [6],
        "softmax_lse_flag": True,
    }
    x = torch.randn(5, 16)
    return {
        "npu_fused_infer_attention_score": ((q, k, v), one),
        "npu_fused_infer_attention_score.out": (
            (q, k, v),
            one | {"out": [torch.empty_like(q), torch.empty(6, 4, 1)]},
        ),
        "_npu_fused_infer_attention_score_get_max_workspace": ((q, k, v), one),
        "_npu_fused_infer_attention_score_infer_output": (
            (q, v),
            {"num_heads": 4, "input_layout": "TND"},
        ),
        "npu_rms_norm": ((x, x[0]), {}),
        "npu_add_rms_norm": ((x, x, x[0]), {}),
        "npu_swiglu": ((x, -1), {}),
        "npu_rotary_mul": ((torch.randn(2, 5, 3, 16), *[torch.rand(1, 5, 1, 16)] * 2), {}),
        "npu_apply_rotary_pos_emb": ((q, k, *[torch.rand(6, 1, 128)] * 2, "TND"), {}),
        "npu_mrope": (
            (torch.arange(5), torch.randn(5, 128), torch.randn(5, 64), torch.randn(5, 64), 64),
            {},
        ),
        "npu_top_k_top_p": ((x,), {"p": torch.rand(5)}),
        "npu_format_cast": ((x, 29), {}),
        "npu_scatter_nd_update": ((x, torch.tensor([[0]]), x[:1].clone()), {}),
        "npu_scatter_nd_update_": ((x, torch.tensor([[0]]), x[:1].clone()), {}),
        "npu_fusion_attention": (
            (q, q, q, 4, "TND"),
            {"actual_seq_qlen": [6], "actual_seq_kvlen": [6]},
        ),
        "npu_scatter_pa_kv_cache": ((), cache_case()),
        "npu_moe_init_routing_v2": (
            ragged(),
            ROUTING | {"active_num": 15, "active_expert_range": [1, 5]},
        ),
        "npu_grouped_matmul": (
            ([x], [torch.randn(2, 16, 3)]),
            {"group_list": torch.tensor([2, 3]), "group_list_type": 1}
            | {"group_type": 0, "split_item": 2},
        ),
    }


@pytest.mark.parametrize("name", sorted(meta_cases()))
def test_meta_gives_the_same_shapes(name: str) -> None:
    """The Meta kernel of a call agrees with the CPU kernel in shape and dtype."""
    args, kwargs = meta_cases()[name]

    def bare(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return [bare(item) for item in value]
        return value.to("meta") if isinstance(value, Tensor) else value

    far = op(name)(*map(bare, args), **{key: bare(value) for key, value in kwargs.items()})
    assert shapes(far) == shapes(op(name)(*args, **kwargs))


def test_implement_alone() -> None:
    """Where the schemas are already defined, `implement` adds kernels for one key only."""
    program = """
import torch
from tests.npu import reference
library = torch.library.Library("npu", "FRAGMENT")
for schema in reference.SCHEMAS.values():
    library.define(schema.removeprefix("npu::"))
kept = reference.implement("CPU")
assert torch.ops.npu.npu_swiglu(torch.zeros(2, 4)).shape == (2, 2)
assert not torch._C._dispatch_has_kernel_for_dispatch_key("npu::npu_swiglu", "Meta")
"""
    here = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=here)
