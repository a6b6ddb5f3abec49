"""Decode steps as NPU graphs, which are captured natively or compiled by torchair."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanoactor.models.batch import AttentionBatch, ForwardInputs, KVCache
from nanoactor.models.devices.npu.attention import Plan
from nanoactor.models.devices.npu.runtime import AscendRuntime, RecordedGraph
from nanoactor.models.devices.protocols import CapturedFunction, ForwardFunction
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.layers.state import paged_caches
from nanoactor.models.options import DeviceOptions
from nanoactor.models.seq_lens import NO_SEQ_LENS, HostSeqLens

log = logging.getLogger("nanoactor.models.npu")


def graph_cache_directory(directory: str | None) -> Path:
    """Return the directory for compiled graphs: `directory`, or a subdirectory of the user's cache
    directory if it is None.

    The directory is created if necessary. Raises `UnsupportedModel` if it is not writable.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = (
        Path(directory).expanduser()
        if directory is not None
        else Path(cache_home) / "nanoactor" / "graphs"
    )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnsupportedModel(f"graph_cache_dir {path} cannot be created: {error}") from error
    if not os.access(path, os.W_OK):
        raise UnsupportedModel(f"graph_cache_dir {path} is not writable; choose another directory")
    return path


class NativeCapture:
    """A step that is captured several times, once for each replay that may be queued at a time. The
    graphs are replayed in turn.

    Sequence lengths are parameters that the host writes into a graph before a replay. The next
    replay is prepared while the current one is running, so it must use another graph.
    """

    def __init__(
        self,
        runtime: AscendRuntime,
        function: CapturedFunction,
        lengths: HostSeqLens,
        in_flight: int,
    ) -> None:
        record = functools.partial(function, lengths)
        self._graphs: list[RecordedGraph] = [runtime.record(record) for _ in range(in_flight)]
        self._current = 0

    def replay(self, lengths: HostSeqLens) -> torch.Tensor:
        """Write the context lengths into the next graph, launch it, and return its result tensor.
        If the graph is still running, wait first."""
        graph = self._graphs[self._current]
        self._current = (self._current + 1) % len(self._graphs)
        if not graph.end_event.is_done():
            _log_once(
                "more steps are in flight than graphs were captured: waiting for a step to end"
            )
            graph.end_event.wait()
        graph.replay(lengths.decode_contexts)
        return graph.result


class CompiledStep:
    """The forward pass of decode steps with a fixed number of rows, which torchair compiles in the
    first call."""

    def __init__(
        self, mode: str, runtime: AscendRuntime, options: DeviceOptions, directory: Path
    ) -> None:
        """Store the settings; nothing is compiled yet.

        `mode` is "max-autotune" (a graph for the graph engine, cached in `directory`) or
        "reduce-overhead" (a native graph made by torchair's passes).
        """
        self._mode, self._runtime, self._options = mode, runtime, options
        self._directory = directory
        self._module: DecodePass | None = None

    def __call__(self, forward: ForwardFunction, inputs: ForwardInputs) -> torch.Tensor:
        """Run the forward pass, compiling it in the first call, and return the hidden states,
        (rows, hidden)."""
        batch, token_ids = inputs.batch, inputs.token_ids
        plan: Plan = batch.plan
        if self._module is None:
            caches = paged_caches(inputs.states)
            assert caches is not None, "compiled graphs do not support states by slot"
            self._module = DecodePass(forward, caches, plan)
            self._compile(self._module, len(token_ids), plan)
        contexts: Any = plan.contexts
        if self._mode == "max-autotune":
            contexts = batch.decode_contexts.long()
        hidden: torch.Tensor = self._module(
            token_ids, inputs.positions, batch.slot_mapping, plan.tables, contexts
        )
        return hidden

    def _compile(self, module: DecodePass, rows: int, plan: Plan) -> None:
        import torchair

        config = torchair.CompilerConfig()
        config.mode = self._mode
        # Keys and values are written to the inputs themselves, not to copies.
        config.experimental_config.keep_inference_input_mutations = True
        if self._mode == "reduce-overhead":
            backend = torchair.get_npu_backend(compiler_config=config)
            # Lengths are integers that change: as symbols, they trigger no compilation per step.
            module.compiled = torch.compile(
                module.decode, backend=backend, dynamic=True, fullgraph=True
            )
            return
        # Registers attention in torch.ops.air that accepts lengths as tensors.
        importlib.import_module("torchair.ops._npu_fused_infer_attention_score")
        directory = self._directory / self._key(module, rows, plan)
        if any(directory.rglob("compiled_module")):
            _log_once(f"using graphs that an earlier start compiled, from {self._directory}")
        directory.mkdir(parents=True, exist_ok=True)
        method = types.MethodType(_decode_for_size(module, rows), module)
        module.compiled = torchair.inference.cache_compile(
            method, config=config, cache_dir=str(directory), dynamic=False, ge_cache=True
        )

    def _key(self, module: DecodePass, rows: int, plan: Plan) -> str:
        """Return a key that changes with everything that a compiled graph depends on: model,
        shapes, versions, and our own code."""
        network = getattr(module.forward_function, "__self__", None)
        cache = module.caches[0].keys
        parts = [
            repr(getattr(network, "config", None)),
            repr(getattr(network, "shard", None)),
            getattr(network, "max_positions", None),  # rows of the rotary table
            [rows, list(plan.tables.shape), list(cache.shape), str(cache.dtype)],
            self._options.attention_layout,
            self._options.weight_format,
            self._runtime.versions(),
            _source_digest(),
        ]
        text = json.dumps(parts, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


class DecodePass(torch.nn.Module):
    """Forward pass of a decode step as a module whose arguments are only tensors and lengths, as
    torchair requires."""

    def __init__(self, forward: ForwardFunction, caches: list[KVCache], plan: Plan) -> None:
        super().__init__()
        self.forward_function, self.caches = forward, caches
        self._mask, self._ends = plan.mask, plan.query_ends
        self.compiled: Callable[..., torch.Tensor] | None = None

    def forward(self, *arguments: Any) -> torch.Tensor:
        """Run the compiled forward pass."""
        assert self.compiled is not None
        return self.compiled(*arguments)

    def decode(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        tables: torch.Tensor,
        contexts: Any,
    ) -> torch.Tensor:
        """Return the hidden states of a decode step. This is the method that is compiled.

        `contexts` is the context length of each row, as a list of integers or an int64 tensor.
        """
        ends: list[int] | torch.Tensor = self._ends
        if isinstance(contexts, torch.Tensor):
            ends = torch.arange(1, len(token_ids) + 1, device=contexts.device)
        plan = Plan(tables, self._mask, ends, [], contexts)
        nothing = token_ids[:0]
        batch = AttentionBatch(
            slot_mapping,
            tables,
            block_size=self.caches[0].keys.shape[1],
            prefill_tokens=0,
            prefill_rows=nothing,
            prefill_tiles=nothing,
            decode_slots=nothing,
            decode_contexts=nothing,
            lengths=NO_SEQ_LENS,
            plan=plan,
        )
        return self.forward_function(ForwardInputs(token_ids, positions, self.caches, batch))


def _decode_for_size(module: DecodePass, rows: int) -> types.FunctionType:
    """Return a copy of `decode` with its own code object. torchair looks up compiled graphs by code
    object, and would treat different numbers of rows with the same object as recompilations."""
    decode = DecodePass.decode
    name = f"decode_{rows}"
    code = decode.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, decode.__globals__, name, decode.__defaults__)


@functools.cache
def _source_digest() -> str:
    """Return a digest of the source code of `nanoactor.models`, because changed code may compile to
    different graphs."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _log_once(text: str) -> None:
    log.warning(text)
