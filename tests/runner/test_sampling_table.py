"""Which rows are left to PyTorch's sampler, for each kind of fused one."""

import dataclasses

import numpy as np
import pytest

from nanoactor.models.sampling.columns import WORDS, pack
from nanoactor.runner.batch.sampling_table import SamplingTable
from nanoactor.runner.steps.warmup import admissions

ROWS = [
    {"temperature": 0.0, "top_p": 0.5},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 256, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 257},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.1},
]


@pytest.mark.parametrize(
    ("fused", "left"),
    [
        ("none", [0, 1, 2, 3, 4, 5]),
        ("greedy", [1, 2, 3, 4, 5]),
        ("bounded_top_k", [3]),
        ("all", []),
    ],
)
def test_rows_that_a_fused_sampler_leaves(fused, left):
    table, count = SamplingTable(len(ROWS)), len(ROWS)
    words = np.frombuffer(b"".join(map(pack, ROWS)), np.int32).reshape(-1, WORDS)
    slots = np.arange(count, dtype=np.int32)
    table.admit(dataclasses.replace(admissions(slots), sampling=words))
    assert np.flatnonzero(table.never_fused(slots.astype(np.int64), fused)).tolist() == left
