"""Log-probabilities against NumPy, for whole vocabularies and for ranks' parts of one."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoactor.models.collective import SingleRank
from nanoactor.models.sampling.token_scores import TokenScorer

VOCABULARY = 23


class Ranks:
    """A group of threads."""

    def __init__(self, rank, size, shared):
        self.rank, self.size = rank, size
        self._parts, self._barrier = shared

    def all_gather(self, x):
        self._parts[self.rank] = x.clone()
        self._barrier.wait()
        found = torch.stack(list(self._parts))
        self._barrier.wait()
        return found


def sharded(logits, targets, most, size):
    """What each of so many ranks says, of its part padded to equal width."""
    width = -(-logits.shape[1] // size)
    shared = [None] * size, threading.Barrier(size, timeout=60)
    results = [None] * size

    def work(rank):
        part = logits[:, rank * width : (rank + 1) * width]
        part = torch.nn.functional.pad(part, (0, width - part.shape[1]), value=99.0)
        scorer = TokenScorer(Ranks(rank, size, shared), rank * width, logits.shape[1])
        results[rank] = scorer(part.clone(), targets, most)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


def read(table, most):
    """(log-probabilities, ranks, ids, their log-probabilities)."""
    table = table.numpy()
    values = np.ascontiguousarray(table[:, [0, *range(2 + most, 2 + 2 * most)]]).view(np.float32)
    return values[:, 0], table[:, 1], table[:, 2 : 2 + most], values[:, 1:]


def reference(logits):
    wide = logits.double().numpy()
    top = wide.max(-1, keepdims=True)
    return wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    most=st.integers(0, 30),
    spread=st.sampled_from([0.1, 3.0, 60.0]),
    seed=st.integers(0, 1000),
    size=st.sampled_from([1, 2, 3]),
)
def test_scores_are_those_of_a_log_softmax(rows, most, spread, seed, size):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCABULARY, generator=generator) * spread
    targets = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    right = reference(logits)
    if size == 1:
        table = TokenScorer(SingleRank(), 0, VOCABULARY)(logits.clone(), targets, most)
    else:
        table = sharded(logits, targets, most, size)
    count = min(most, VOCABULARY)
    assert table.shape == (rows, 2 + 2 * count)
    assert table.dtype == torch.int32
    own, ranks, ids, values = read(table, count)
    picked = right[np.arange(rows), targets]
    assert own == pytest.approx(picked, abs=1e-4)
    assert ranks.tolist() == ((right > picked[:, None]).sum(-1) + 1).tolist()
    order = np.argsort(-right, axis=-1, kind="stable")[:, :count]
    assert ids.tolist() == order.tolist()
    assert values == pytest.approx(np.take_along_axis(right, order, -1), abs=1e-4)


def test_of_equal_logits_the_lower_id_comes_first():
    logits = torch.zeros(1, 7)
    logits[0, 4:] = 1.0
    _, ranks, ids, _ = read(TokenScorer(SingleRank(), 0, 7)(logits, torch.tensor([5]), 5), 5)
    assert ids[0, :3].tolist() == [4, 5, 6]
    assert ranks.tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    logits = torch.randn(3, 4001, generator=torch.Generator().manual_seed(1)).to(dtype)
    table = TokenScorer(SingleRank(), 0, 4001)(logits.clone(), torch.tensor([1, 2, 3]), 1)
    right = reference(logits.float())
    assert read(table, 1)[0] == pytest.approx(right[[0, 1, 2], [1, 2, 3]], abs=1e-4)
