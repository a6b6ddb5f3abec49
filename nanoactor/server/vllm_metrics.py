"""Copies of our metrics under the names that vLLM uses, for existing dashboards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

NAMES: Mapping[str, str] = {
    "running_sequences": "num_requests_running",
    "queue_requests": "num_requests_waiting",
    "kv_use_ratio": "kv_cache_usage_perc",
    "prefix_cache_prompt_tokens": "prefix_cache_queries",
    "prefix_cache_hit_tokens": "prefix_cache_hits",
    "preemptions": "num_preemptions",
    "prefill_tokens": "prompt_tokens",
    "output_tokens": "generation_tokens",
    "request_success": "request_success",
    "request_seconds": "e2e_request_latency_seconds",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "request_queue_time_seconds": "request_queue_time_seconds",
    "request_prefill_time_seconds": "request_prefill_time_seconds",
    "request_decode_time_seconds": "request_decode_time_seconds",
    "request_inference_time_seconds": "request_inference_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_output_tokens": "request_generation_tokens",
    "request_max_num_generation_tokens": "request_max_num_generation_tokens",
}
"""Our metric names (without `nanoactor_`), mapped to vLLM's (without `vllm:`). The units are the
same.

`num_requests_waiting` counts requests until their first token. `prompt_tokens` counts only computed
tokens, not those found in the prefix cache.
"""
_OUR_PREFIX = "nanoactor_"


def with_vllm_names(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """Yield copies of all metrics that vLLM also has, under its names and with its labels
    `model_name` and `engine`."""
    labels = {"model_name": model, "engine": "0"}
    for family in families:
        theirs = NAMES.get(family.name.removeprefix(_OUR_PREFIX))
        if theirs is None or not family.name.startswith(_OUR_PREFIX):
            continue
        copy = Metric(f"vllm:{theirs}", family.documentation, family.type)
        for sample in family.samples:
            name = f"vllm:{theirs}{sample.name.removeprefix(family.name)}"
            copy.samples.append(Sample(name, {**labels, **sample.labels}, sample.value))
        yield copy
