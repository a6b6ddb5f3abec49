"""Engine options as programs for vLLM give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nanoactor.config import EngineConfig
from nanoactor.errors import InvalidConfig
from nanoactor.named_parameters import meant

SAME: Mapping[str, str] = {
    "gpu_memory_utilization": "memory_utilization",
    "num_gpu_blocks_override": "num_kv_blocks",
}
"""vLLM's names of options, and ours."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_local_media_path": ("",),
    "compilation_config": ({},),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "disable_custom_all_reduce": (True, False),
    "disable_log_stats": (True, False),
    "distributed_executor_backend": ("mp",),
    "enable_chunked_prefill": (True,),
    "enable_lora": (False,),
    "hf_overrides": ({},),
    "hf_token": (),
    "kv_cache_dtype": ("auto",),
    "mm_processor_kwargs": ({},),
    "pipeline_parallel_size": (1,),
    "quantization": (),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs", "priority"),
    "speculative_config": (),
    "swap_space": (0, 4),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
    "tokenizer_revision": (),
    "trust_remote_code": (False,),
}
"""Options of vLLM's without a counterpart, and the values, besides None, that ask for nothing or
for what is always so."""


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration. Raises `InvalidConfig`, with the name that was meant for one that
    is not known."""
    known = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        ours = SAME.get(name, name)
        if ours in chosen or (ours != name and ours in options):
            raise InvalidConfig(f"{name} and {ours} are the same option: give one of them")
        if ours in known:
            chosen[ours] = value
        elif name in NEUTRAL:
            _check_neutral(name, value)
        else:
            raise InvalidConfig(
                f"unknown engine option {name!r:.100}{meant(name, [*known, *SAME])}"
            )
    return EngineConfig(model, **chosen)


def _check_neutral(name: str, value: Any) -> None:
    accepted = NEUTRAL[name]
    if value is None or any(value == one and type(value) is type(one) for one in accepted):
        return
    shown = " or ".join(repr(one) for one in (*accepted, None))
    raise InvalidConfig(f"{name} is not supported; only {shown} is accepted, got {value!r:.100}")
