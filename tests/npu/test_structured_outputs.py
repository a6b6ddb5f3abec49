"""Rung 0: constrained answers on the NPU device, whose operators are the reference kernels."""

import asyncio

import pytest

from nanoactor.runner.steps.graph_runner import GraphRunner
from tests.engine.test_structured_outputs import answers
from tests.npu.emulation import emulate, relaxed


@pytest.fixture
def continued(monkeypatch):
    """Of each step how many rows continued an output, and how many of them were of one that had
    another. Asserts that the lengths which the host tells attention are those that the device
    counts."""
    found = []
    run = GraphRunner.run

    def checked(self, update, staged, fits):
        states = run(self, update, staged, fits)
        if self._device.traits.needs_host_seq_lens:
            batch = self._forward._resident
            slots = batch.rows.slots[: update.decode_rows].tolist()
            counted = self._forward._buffers.contexts[: update.decode_rows].tolist()
            frozen = batch.tables.frozen[slots].tolist()
            for told, context, is_frozen in zip(
                update.lengths.decode_contexts, counted, frozen, strict=True
            ):
                assert told > context if is_frozen and told != context else told == context
            found.append((update.continued, len(slots) - len({*slots})))
        return states

    monkeypatch.setattr(GraphRunner, "run", checked)
    return found


@pytest.mark.parametrize(
    ("layout", "mode"), [("tnd", "npugraph"), pytest.param("bnsd", "eager", marks=pytest.mark.long)]
)
def test_answers_are_the_cpus(monkeypatch, continued, layout, mode):
    """Every kind of grammar, alongside a free request."""
    opened = emulate(monkeypatch)
    limits = dict(max_num_seqs=5, max_num_batched_tokens=24, max_model_len=200, pipeline_depth=2)
    options = dict(device="npu", placement="single", num_kv_blocks=5)
    options |= dict(attention_layout=layout, graph_mode=mode)
    with relaxed():  # the demo has heads of 64
        found, figures = asyncio.run(answers(6, **limits, **options))
    most, runs = map(max, zip(*continued, strict=True))
    assert most > 1
    assert runs > 1
    assert figures["runner.0"]["actor"]["steps_uncaptured"] == 0
    replayed = [kind for kind, _ in opened[-1].runtime.log].count("replay")
    assert (replayed > 15) == (mode == "npugraph")
    expected, _ = asyncio.run(answers(6, device="cpu", **limits))
    assert [o.outputs[0] for o in found] == [o.outputs[0] for o in expected]
