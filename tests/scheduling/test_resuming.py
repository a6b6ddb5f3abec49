"""Requests whose output began before a death: what is computed of it, step by step."""

import dataclasses

import numpy as np
import pytest

from nanoactor.messages import Credits, Match, Plan, StepDone
from tests.scheduling.test_forking import admit, of_kind, scheduler

NONE = np.empty(0, np.int32)


def planned(prompt, tokens, hits, chunk=32):
    """(start, count, samples) of each chunk of a request of so many tokens, of which `prompt` are
    its prompt, and `hits` are found in the cache; blocks have four."""
    logic = scheduler(depth=1, max_num_batched_tokens=chunk)
    event = dataclasses.replace(admit(range(tokens), 1), prompt_length=prompt)
    (match,) = of_kind(logic.handle(event), Match)
    answer = Credits(
        np.array([match.uid]), np.array([hits], np.int32), np.zeros(1, np.int32), NONE, NONE, None,
        0, np.empty(0, np.int64),
    )  # fmt: skip
    found, sent = [], logic.handle(answer)
    while len((plan := of_kind(sent, Plan)[0]).slots):
        rows = zip(plan.starts, plan.counts, plan.samples, strict=True)
        found += [(int(start), int(count), bool(samples)) for start, count, samples in rows]
        tokens = [7] * int(plan.samples.sum())
        done = StepDone(plan.step, np.array(tokens, np.int32), 0.0, 1, NONE, [], NONE)
        sent = logic.handle(done)
    return found


@pytest.mark.parametrize(
    ("prompt", "tokens", "hits", "chunks"),
    [
        pytest.param(6, 15, 14, [(14, 1, True)], id="the newest"),
        pytest.param(6, 15, 12, [(12, 1, False), (13, 1, False), (14, 1, True)], id="the last"),
        pytest.param(6, 16, 12, [(n, 1, n == 15) for n in range(12, 16)], id="a full last block"),
        pytest.param(4, 8, 4, [(n, 1, n == 7) for n in range(4, 8)], id="a full only block"),
        pytest.param(6, 8, 4, [(4, 2, False), (6, 1, False), (7, 1, True)], id="behind a prompt"),
        pytest.param(6, 15, 8, [(8, 7, True)], id="more than a block"),
        pytest.param(15, 15, 12, [(12, 3, True)], id="a prompt"),
    ],
)
def test_what_a_last_block_lacks_is_computed_token_by_token(prompt, tokens, hits, chunks):
    assert planned(prompt, tokens, hits) == chunks
