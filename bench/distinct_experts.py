"""Which experts the rows of a decode step choose, and how many of them are distinct.

A step reads the matrices of each chosen expert once, so its time depends on the number of distinct
experts per layer. In the engine's kernels, the choices never leave the GPU. `ChoiceRecorder`
therefore loads the engine's model a second time and runs each row's tokens up to that step as a
prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanoactor.model_files.files import read_model_files
from nanoactor.models.batch import AttentionBatch, ForwardInputs
from nanoactor.models.devices import open_device
from nanoactor.models.layers.state import paged_caches
from nanoactor.models.seq_lens import HostSeqLens
from nanoactor.models.weights.linear import Router
from nanoactor.options.config import EngineConfig
from nanoactor.runner.config import RankConfig
from nanoactor.runner.model.model import LoadedModel
from nanoactor.setup.actors import ActorConfig


class ChoiceRecorder:
    """A model that records which experts its layers choose for the last token of a sequence."""

    def __init__(self, directory: Path, max_tokens: int, **options: Any) -> None:
        """Load the model. `options` are those of the engine, with the same random weights if
        `load_format` is "dummy". Sequences may have up to `max_tokens` tokens."""
        engine = EngineConfig(
            str(directory), skip_tokenizer_init=True, max_model_len=max_tokens, **options
        )
        shared = ActorConfig(engine, read_model_files(engine), bytes(16))
        device = open_device(engine.device)
        self._model = LoadedModel(RankConfig(shared), device)
        self._device: Any = device
        self._blocks = -(-max_tokens // self._model.block_size)
        self._states = [
            state.allocate(device.zeros, self._blocks, self._model.block_size, 1)
            for state in self._model.network.states
        ]
        assert paged_caches(self._states) is not None, "slot states are not supported"
        self._chosen: list[torch.Tensor] = []
        self._route = device.route
        self._device.route = self._record

    def _record(self, x: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
        ids, topk_weights = self._route(x, router)
        self._chosen.append(ids[-1])
        return ids, topk_weights

    def choices(self, token_ids: Sequence[int]) -> list[list[int]]:
        """Return the experts that each layer with experts chooses for the last of these tokens."""
        self._chosen.clear()
        with torch.inference_mode(), self._device.stream():
            self._model.network.forward(self._inputs(token_ids))
            return [sorted(ids) for ids in torch.stack(self._chosen).tolist()]

    def _inputs(self, token_ids: Sequence[int]) -> ForwardInputs:
        """Return the inputs of a prompt in slot 0, in the first blocks of the cache."""
        model, device, count = self._model, self._device, len(token_ids)

        def int32(values: Sequence[Any]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device.torch_device)

        shard = model.network.shard
        heads = shard.heads.size, shard.kv_heads.size, model.config.head_dim
        programs = -(-count // device.tokens_per_program(*heads[:2]))
        batch = AttentionBatch(
            torch.arange(count, device=device.torch_device),
            int32([range(self._blocks)]),
            model.block_size,
            prefill_tokens=count,
            prefill_rows=int32([[0], [0], [count], [count]]),
            prefill_tiles=int32([[0] * programs, range(programs)]),
            decode_slots=int32([]),
            decode_contexts=int32([]),
            lengths=HostSeqLens([count], [count], []),
        )
        batch = device.plan(device.scratch(1, *heads, model.config.vocab_size), batch)
        return ForwardInputs(int32(token_ids), int32(range(count)), self._states, batch)


def distinct(choices: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Return the number of distinct experts in each layer. `choices` are those of each row."""
    return [len(set().union(*layer)) for layer in zip(*choices, strict=True)]


def summarize(counts: Sequence[int]) -> dict[str, float]:
    """Return the mean, the minimum and the maximum over the layers."""
    return {"mean": statistics.mean(counts), "min": min(counts), "max": max(counts)}


def expected(experts: int, top_k: int, rows: int) -> float:
    """Return the expected number of distinct experts if each row draws `top_k` of them
    uniformly, without replacement, independently of the other rows."""
    return experts * (1 - (1 - top_k / experts) ** rows)
