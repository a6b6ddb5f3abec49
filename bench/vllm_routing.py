"""Routing by a table, as a plugin of vLLM: row i of a step has the experts in row i of the table.

The table is drawn uniformly, without replacement within a row. vLLM's own `uniform_random` draws
with replacement, so that a row may have the same expert twice. `bench/gpu_vllm.py` uses it.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

STRATEGY = "table"
_USED = "BENCH_TABLE_ROUTING_USED"
"""Environment variable with the name of a file that is created when the table is first used."""
_ROWS = 4096
"""Number of rows of the table. Steps with more tokens use it repeatedly."""
_METADATA = "Metadata-Version: 2.1\nName: table_routing\nVersion: 1.0\n"
_ENTRY_POINTS = "[vllm.general_plugins]\ntable_routing = bench.vllm_routing:register\n"


@functools.cache
def table(experts: int, top_k: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the experts of each row, (rows, top_k)."""
    rng = np.random.default_rng(0)
    rows = np.tile(np.arange(experts), (_ROWS, 1))
    return rng.permuted(rows, axis=1)[:, :top_k]


def distinct_experts(experts: int, top_k: int, rows: int) -> int:
    """Return the number of distinct experts of the first rows, which is the same in all layers."""
    return len(np.unique(table(experts, top_k)[:rows]))


def install(directory: Path) -> None:
    """Make all processes of vLLM that this one starts route by the table. `directory` is an empty
    directory, which must exist as long as they run."""
    information = directory / "table_routing-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(_METADATA)
    (information / "entry_points.txt").write_text(_ENTRY_POINTS)
    paths = [str(directory), str(Path(__file__).parent.parent)]
    sys.path[:0] = paths
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([inherited] if inherited else [])])
    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = STRATEGY
    os.environ[_USED] = str(directory / "used")


def check_use() -> None:
    """Raise `RuntimeError` if vLLM has not used the table, for example because a kernel routes by
    itself."""
    if not Path(os.environ[_USED]).exists():
        raise RuntimeError("vLLM has not routed by the table")


def register() -> None:
    """Add the strategy to those of vLLM, which calls this in each of its processes."""
    import torch
    from vllm.model_executor.layers.fused_moe.router import routing_simulator_router as simulated

    class TableRouting(simulated.RoutingStrategy):  # type: ignore[misc]
        """Looks up the experts of each row. All weights are equal."""

        def __init__(self) -> None:
            self._tables: dict[Any, torch.Tensor] = {}

        def route_tokens(
            self,
            hidden_states: torch.Tensor,
            router_logits: torch.Tensor,
            top_k: int,
            indices_type: torch.dtype | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, experts = router_logits.shape
            key = experts, top_k, router_logits.device
            if key not in self._tables:  # by the profiling run, before graphs are captured
                self._tables[key] = torch.from_numpy(table(experts, top_k)).to(router_logits.device)
                Path(os.environ[_USED]).touch()
            ids = self._tables[key]
            if tokens > len(ids):
                ids = ids.repeat(-(-tokens // len(ids)), 1)
            ids = ids[:tokens].to(indices_type or torch.long)
            return torch.full_like(ids, 1 / top_k, dtype=torch.float32), ids

    simulated.RoutingSimulator.register_strategy(STRATEGY, TableRouting())
