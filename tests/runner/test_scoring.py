"""Log-probabilities behind a step: which rows, and never many rows of logits at once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanoactor.models.collective import SingleRank
from nanoactor.runner.row_order import RowOrder
from nanoactor.runner.scored_rows import ScoreTable
from nanoactor.runner.scoring import AT_ONCE, StepScorer
from nanoactor.runner.staging import DeviceScores
from nanoactor.scores import ScoredChunks, ScoreRequests

WIDTH, VOCABULARY = 8, 31


def int32(*values):
    return np.array(values, np.int32)


def model(weight, sizes):
    def logits(hidden):
        sizes.append(len(hidden))
        return hidden @ weight

    shard = SimpleNamespace(vocabulary=SimpleNamespace(start=0))
    network = SimpleNamespace(logits=logits, shard=shard)
    config = SimpleNamespace(vocab_size=VOCABULARY)
    return SimpleNamespace(network=network, group=SingleRank(), config=config)


@pytest.mark.parametrize(("prompts", "rows"), [(1000, 3), (0, 300), (129, 0), (128, 128)])
def test_a_few_rows_of_logits_at_a_time(prompts, rows):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(WIDTH, VOCABULARY, generator=generator)
    hidden = torch.randn(prompts + 5, WIDTH, generator=generator)
    sampling = torch.randn(rows + 9, WIDTH, generator=generator)
    chosen = torch.randint(0, VOCABULARY, (rows + 9,), generator=generator).int()
    targets = torch.randint(0, VOCABULARY, (prompts,), generator=generator)
    places = torch.arange(rows + 9)[9:].flip(0)
    order = torch.randperm(prompts + 5, generator=generator)[:prompts]
    sizes = []
    scorer = StepScorer(model(weight, sizes))
    wanted = DeviceScores(order, targets, torch.arange(rows), 2)
    table = scorer.score(hidden, sampling, wanted, places, chosen)
    assert max(sizes) <= AT_ONCE
    assert sum(sizes) == len(table) == prompts + rows
    logits = torch.cat((hidden[order], sampling[places])) @ weight
    right = logits.log_softmax(-1).gather(1, torch.cat((targets, chosen[places].long()))[:, None])
    torch.testing.assert_close(table[:, :1].contiguous().view(torch.float32), right)


ORDER = RowOrder(prompts=0, resumed=0, decodes=8)


def step(scored=(), starts=(), counts=(), slots=()):
    return SimpleNamespace(
        scored=scored, starts=int32(*starts), counts=int32(*counts), slots=int32(*slots)
    )


def test_rows_are_found_among_the_chunks_of_a_step():
    table, every = ScoreTable(8), np.arange(8)
    assert table.rows(step(), every, table.asking(every), ORDER) is None
    table.admit(int32(5, 2, 7), ScoreRequests(int32(0, 2), int32(3, -1), int32(-1, 1)))
    assert table.asking(every).tolist() == [5]
    assert table.asking(np.array([7, 5, 2])).tolist() == [1]
    # Chunks of slots 1, 7 and 2, of 4, 6 and 1 tokens; of the second, positions 12 to 14.
    chunks = ScoredChunks(int32(1), int32(12), int32(3), int32(40, 41, 42))
    chunked, order = step((chunks,), (0, 10, 9), (4, 6, 1), (1, 7, 2)), RowOrder(3, 2, 1)
    found = table.rows(chunked, every, np.array([5]), order)
    assert found.prompt_rows.tolist() == [4 + 2, 4 + 3, 4 + 4]
    assert found.targets.tolist() == [40, 41, 42]
    assert found.rows.tolist() == [5]
    assert found.places.tolist() == [3]  # of the decode row
    assert found.counts.tolist() == [1, 1, 1, 3]
    assert found.most == 3
    table.admit(int32(5), None)  # somebody else has the slot
    assert not len(table.asking(every))


def test_each_row_is_told_what_it_asked_for():
    table, every = ScoreTable(4), np.arange(4)
    table.admit(int32(0, 1, 2), ScoreRequests(int32(0, 1, 2), int32(2, 0, 9), int32(-1, -1, -1)))
    found = table.rows(step(), every, table.asking(every), ORDER)
    words = np.arange(3 * 8, dtype=np.int32).reshape(3, 8)  # three of the likeliest, all there are
    message = found.message(words)
    assert message.rows.tolist() == [0, 1, 2]
    assert message.scores.counts.tolist() == [2, 0, 3]
    assert message.scores.ranks.tolist() == [1, 9, 17]
    assert message.scores.top_ids.tolist() == [2, 3, 18, 19, 20]
    assert message.scores.top_logprobs.view(np.int32).tolist() == [5, 6, 21, 22, 23]
