"""npu_fused_infer_attention_score by way of both layouts, against the reference kernel, which gets
packed tokens in float32."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch

from nanoactor.models.batch import KVCache
from nanoactor.models.devices.npu.attention import MASK_SIZE, make_attention
from nanoactor.models.options import ATTENTION_LAYOUTS
from nanoactor.models.seq_lens import HostSeqLens
from tests.npu.reference.registry import KERNELS
from tests.npu.smoke_checks.frame import (
    BLOCK,
    Check,
    Failed,
    Rig,
    Shape,
    noise,
    off,
    short,
    told_of,
)
from tests.npu.smoke_checks.operators import caches, over_models


@dataclasses.dataclass(frozen=True)
class Case:
    """A step's rows."""

    prefills: tuple[tuple[int, int], ...] = ()
    """(tokens, context) of each chunk."""
    decodes: tuple[int, ...] = ()
    """Contexts."""
    shared: int = 0
    """How many blocks at its beginning each row has in common with the others."""
    spare: bool = True
    """Whether the pool has as many blocks as the rows would have if they shared none."""

    @property
    def lengths(self) -> HostSeqLens:
        """As a step's plan takes them."""
        tokens, contexts = ([row[n] for row in self.prefills] for n in (0, 1))
        return HostSeqLens(tokens, contexts, [*self.decodes])

    @property
    def contexts(self) -> list[int]:
        """Of all rows."""
        return [context for _, context in self.prefills] + [*self.decodes]

    @property
    def tokens(self) -> list[int]:
        """New ones of all rows."""
        return [tokens for tokens, _ in self.prefills] + [1] * len(self.decodes)


CASES = {
    "decode": Case(decodes=(1, 127, 128, 129, 300, 1000)),
    "fresh prefill": Case(prefills=((5, 5), (128, 128), (200, 200), (1, 1))),
    "one prompt": Case(prefills=((300, 300),)),
    "chunked prefill": Case(prefills=((64, 300), (100, 228))),
    "prefix hit": Case(prefills=((10, 138), (20, 276)), decodes=(200,), shared=1),
    "mixed": Case(prefills=((64, 300), (50, 50)), decodes=(1, 257, 512)),
}
SHARED = Case(decodes=(300, 310, 320, 330), shared=2, spare=False)


def tables_of(case: Case) -> tuple[torch.Tensor, int]:
    """Block tables int32 (rows, blocks of the longest), and how many blocks the pool has."""
    needed = [-(-context // BLOCK) for context in case.contexts]
    own = [max(0, count - case.shared) for count in needed]
    used = case.shared + sum(own)
    numbers = torch.randperm(used, generator=torch.Generator().manual_seed(3)).tolist()
    free = iter(numbers[case.shared :])
    tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    for row, count in enumerate(needed):
        common = numbers[: min(count, case.shared)]
        rest = [*itertools.islice(free, count - len(common))]
        tables[row, :count] = torch.tensor(common + rest, dtype=torch.int32)
    return tables, sum(needed) + 3 if case.spare else used


def causal() -> torch.Tensor:
    """int8, 1 where a query must not look."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8).triu(1)


def expected_of(
    case: Case, queries: torch.Tensor, pools: list[torch.Tensor], tables: torch.Tensor, shape: Shape
) -> torch.Tensor:
    """By the reference kernel on the host, in float32."""
    keys, values = (pool.float().flatten(2) for pool in pools)
    attended: torch.Tensor = KERNELS["npu_fused_infer_attention_score"](
        queries.float(),
        keys,
        values,
        atten_mask=causal(),
        actual_seq_lengths=[*itertools.accumulate(case.tokens)],
        actual_seq_lengths_kv=case.contexts,
        block_table=tables,
        block_size=BLOCK,
        num_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        scale=shape.scale,
        input_layout="TND",
        sparse_mode=3,
    )[0]
    return attended


def attend(layout: str, case: Case, rig: Rig, dtype: torch.dtype, shape: Shape) -> float:
    """As a layer calls it."""
    tables, blocks = tables_of(case)
    pools = caches(dtype, shape, blocks)
    queries = noise(sum(case.tokens), shape.heads, shape.size, dtype=dtype, scale=2.0)
    firsts = [*itertools.accumulate(case.tokens, initial=0)]
    lines = [(n, firsts[n], *row) for n, row in enumerate(case.prefills)]
    rows = rig.to(torch.tensor(lines, dtype=torch.int32).view(-1, 4).T)
    attention, cache = make_attention(layout), KVCache(*map(rig.to, pools))
    plan = attention.plan(rig.to(tables), case.lengths, rows, rig.to(causal()))
    found = attention(rig.to(queries), cache, plan, shape.scale)
    return off("attention", found, expected_of(case, queries, pools, tables, shape), dtype)


def run(layout: str, case: Case, dtype: torch.dtype, rig: Rig) -> str:
    """For each model."""
    return over_models(rig, functools.partial(attend, layout, case), dtype)


def small_pool(layout: str, rig: Rig) -> str:
    """Prefix caching needs this; the documents want a block for each sequence that has it."""
    try:
        said = run(layout, SHARED, rig.dtype, rig)
    except Failed:
        raise
    except Exception as error:
        raise Failed(f"refused, which prefix caching cannot do with: {told_of(error)}") from error
    return f"accepted; {said}"


def checks(rig: Rig) -> list[Check]:
    """In their order."""
    operator = "npu_fused_infer_attention_score"
    cases = [
        Check(f"{operator}, {layout}, {name}, {short(d)}", functools.partial(run, layout, case, d))
        for layout in ATTENTION_LAYOUTS
        for name, case in CASES.items()
        for d in rig.dtypes
    ]
    shared = [
        Check(
            f"{operator}, {layout}: shared blocks in a pool smaller than their sum",
            functools.partial(small_pool, layout),
        )
        for layout in ATTENTION_LAYOUTS
    ]
    return cases + shared
