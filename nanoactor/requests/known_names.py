"""Names of vLLM's and SGLang's options and parameters, and what nanoactor does with each of them.

The library, the command line and `docs/migrating_from_vllm.md` share this table. An option that is
missing from it is unknown and is rejected.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Scope = Literal["engine", "server", "sampling"]
Treatment = Literal["same", "alias", "moot", "refused"]
Takes = Literal["value", "flag", "list"]


class _AnyValue:
    """Wildcard in `ForeignOption.accepts`: every value is accepted."""

    def __repr__(self) -> str:
        return "any value"


ANY = _AnyValue()


@dataclasses.dataclass(frozen=True, slots=True)
class ForeignOption:
    """An option or a request parameter of vLLM or SGLang, and its equivalent in nanoactor."""

    theirs: str
    scope: Scope
    ours: str = ""
    """Name of our field with the same meaning; empty if there is none."""
    accepts: tuple[Any, ...] = ()
    """Values that are accepted because they have no effect or request what nanoactor always does.
    None is always accepted."""
    note: str = ""
    """Difference in meaning from our name, or the reason why the name is not supported."""
    takes: Takes = "value"
    """What follows the flag on a command line: one value, nothing, or a list of values."""
    other_flags: tuple[str, ...] = ()
    """Other command-line flags with the same meaning."""
    inverts: bool = False
    """True if the flag sets our option to False."""
    engine: str = "vLLM"

    @property
    def treatment(self) -> Treatment:
        """How nanoactor treats the name: "same" and "alias" are supported, "moot" has no effect,
        and "refused" raises an error."""
        if self.ours:
            return "same" if self.ours == self.theirs else "alias"
        return "moot" if self.accepts else "refused"

    @property
    def flags(self) -> tuple[str, ...]:
        """All command-line flags for the option, including those in `other_flags`."""
        return (f"--{self.theirs.replace('_', '-')}", *self.other_flags)

    def allows(self, value: Any) -> bool:
        """Return True if the value has no effect or requests what nanoactor always does."""
        if value is None or ANY in self.accepts:
            return True
        return any(type(value) is type(one) and value == one for one in self.accepts)

    def error_message(self, value: Any) -> str:
        """Return the message of the error to raise for a value that is not allowed."""
        if not self.accepts or (self.takes == "flag" and self.note):
            return f"{self.theirs} is not supported: {self.note}"
        shown = " or ".join(repr(one) for one in (*self.accepts, None))
        reason = f" ({self.note})" if self.note else ""
        return (
            f"{self.theirs} is not supported: only {shown} is accepted, got {value!r:.100}{reason}"
        )


_engine = functools.partial(ForeignOption, scope="engine")
_server = functools.partial(ForeignOption, scope="server")
_sampling = functools.partial(ForeignOption, scope="sampling")


def _same(scope: Scope, names: str) -> Iterator[ForeignOption]:
    for name in names.split():
        yield ForeignOption(name, scope, name)


_NO_LORA = "LoRA adapters must be merged into the weights"
_NO_QUANTIZATION = "the checkpoint's own `quantization_config` specifies its quantization"
_ONE_STAGE = "layers cannot be spread over devices; use tensor_parallel_size instead"

ENGINE: tuple[ForeignOption, ...] = (
    *_same("engine", "model tokenizer revision download_dir"),
    *_same("engine", "max_num_seqs block_size enable_prefix_caching"),
    *_same("engine", "enforce_eager tensor_parallel_size skip_tokenizer_init"),
    *_same("engine", "limit_mm_per_prompt max_logprobs chat_template"),
    _engine(
        "otlp_traces_endpoint",
        ours="otlp_traces_endpoint",
        note="the full URL; protobuf over HTTP only, not gRPC",
    ),
    _engine("load_format", ours="load_format", note='must be "auto" or "dummy"'),
    _engine(
        "dtype",
        ours="dtype",
        note='"auto" keeps the dtype of the checkpoint if the device supports it',
    ),
    _engine(
        "seed",
        ours="seed",
        note="applies to requests without a seed, each of which gets a different one",
    ),
    _engine("device", ours="device", note="also accepts npu, cpu and simulated:MS"),
    _engine(
        "max_model_len",
        ours="max_model_len",
        note="8k means 8,000 and 8K means 8,192; auto allows as much as fits",
    ),
    _engine("max_num_batched_tokens", ours="max_num_batched_tokens", note="default: 2048"),
    _engine("generation_config", ours="generation_config", note='"auto", "vllm" or a directory'),
    _engine(
        "override_generation_config",
        ours="override_generation_config",
        note="overrides settings of generation_config.json; max_new_tokens is a default, not a cap",
    ),
    _engine(
        "gpu_memory_utilization",
        ours="memory_utilization",
        note="a share of the memory that is free at startup; in vLLM, a share of all memory",
        other_flags=("--device-memory-utilization",),
    ),
    _engine("num_gpu_blocks_override", ours="num_kv_blocks"),
    _engine("tp", ours="tensor_parallel_size", other_flags=("-tp",)),
    _engine("tp_size", ours="tensor_parallel_size", engine="SGLang"),
    _engine("model_path", ours="model", engine="SGLang"),
    _engine("tokenizer_path", ours="tokenizer", engine="SGLang"),
    _engine("context_length", ours="max_model_len", engine="SGLang"),
    _engine(
        "mem_fraction_static",
        ours="memory_utilization",
        note="a share of the memory that is free at startup",
        engine="SGLang",
    ),
    _engine(
        "chunked_prefill_size",
        ours="max_num_batched_tokens",
        note="prompts and streams share the tokens of a step; -1 is rejected",
        engine="SGLang",
    ),
    _engine("max_running_requests", ours="max_num_seqs", engine="SGLang"),
    _engine("page_size", ours="block_size", engine="SGLang"),
    _engine("random_seed", ours="seed", engine="SGLang"),
    _engine(
        "disable_radix_cache",
        ours="enable_prefix_caching",
        takes="flag",
        inverts=True,
        engine="SGLang",
    ),
    _engine("allowed_local_media_path", accepts=("",), note="requests cannot refer to local files"),
    _engine(
        "async_scheduling", accepts=(True,), note="steps are always planned ahead", takes="flag"
    ),
    _engine(
        "attention_backend",
        accepts=("auto",),
        note="the device determines the kernels",
    ),
    _engine(
        "collect_detailed_traces",
        note="spans cover the stages of a request; use /trace for the work inside of a step",
    ),
    _engine(
        "compilation_config",
        accepts=({},),
        note="graphs are captured unless enforce_eager is set",
        other_flags=("-cc",),
    ),
    _engine(
        "convert",
        accepts=("auto", "none"),
        note="embedding checkpoints are detected automatically; for other checkpoints, set "
        "`pooling`",
    ),
    _engine("cpu_offload_gb", accepts=(0, 0.0), note="weights stay on the device"),
    _engine(
        "data_parallel_size",
        accepts=(1,),
        note="use --replicas to serve several engines on Ray",
        other_flags=("-dp",),
    ),
    _engine(
        "disable_custom_all_reduce",
        accepts=(True, False),
        note="the device determines how to sum over ranks",
        takes="flag",
    ),
    _engine(
        "disable_log_stats",
        accepts=(True, False),
        note="statistics are served at /metrics, not written to the log",
        takes="flag",
    ),
    _engine(
        "distributed_executor_backend",
        accepts=("mp",),
        note="ranks are processes on this machine; several engines run on Ray with --replicas",
    ),
    _engine(
        "enable_chunked_prefill",
        accepts=(True,),
        note="prompts are always computed in chunks of max_num_batched_tokens",
        takes="flag",
    ),
    _engine(
        "enable_expert_parallel",
        accepts=(False,),
        note="each rank holds a part of every expert",
        takes="flag",
        other_flags=("-ep",),
    ),
    _engine("enable_lora", accepts=(False,), note=_NO_LORA, takes="flag"),
    _engine("lora_modules", note=_NO_LORA, takes="list"),
    _engine("max_lora_rank", accepts=(16,), note=_NO_LORA),
    _engine(
        "enable_sleep_mode",
        accepts=(False,),
        note="weights stay loaded; end the process to free their memory",
        takes="flag",
    ),
    _engine("hf_overrides", accepts=({},), note="edit the model's config.json instead"),
    _engine("hf_token", note="set HF_TOKEN in the environment instead"),
    _engine(
        "kv_cache_dtype", accepts=("auto",), note="keys and values have the dtype of the weights"
    ),
    _engine("kv_cache_memory_bytes", note="use num_kv_blocks or memory_utilization instead"),
    _engine(
        "kv_transfer_config", accepts=({},), note="each engine computes both prompts and answers"
    ),
    _engine(
        "logits_processors",
        accepts=([], ()),
        note="use logit_bias instead",
        takes="list",
    ),
    _engine(
        "logprobs_mode",
        accepts=("raw_logprobs",),
        note="log-probabilities are always the model's own",
    ),
    _engine("mm_processor_kwargs", accepts=({},), note="pass them with the images of a request"),
    _engine(
        "model_impl",
        accepts=("auto", "vllm"),
        note="nanoactor always uses its own implementations of models",
    ),
    _engine(
        "optimization_level",
        accepts=(1, 2, 3),
        note="graphs are captured unless enforce_eager is set",
        other_flags=("-O",),
    ),
    _engine("pipeline_parallel_size", accepts=(1,), note=_ONE_STAGE, other_flags=("-pp",)),
    _engine("quantization", note=_NO_QUANTIZATION, other_flags=("-q",)),
    _engine(
        "runner",
        accepts=("auto", "generate"),
        note="embedding checkpoints are detected automatically; for other checkpoints, set "
        "`pooling`",
    ),
    _engine(
        "task",
        accepts=("auto", "generate"),
        note="embedding checkpoints are detected automatically; for other checkpoints, set "
        "`pooling`",
    ),
    _engine(
        "scheduling_policy",
        accepts=("fcfs", "priority"),
        note="requests without a priority are served first come, first served",
    ),
    _engine(
        "speculative_config",
        accepts=({},),
        note="speculative decoding is not supported",
        other_flags=("-sc",),
    ),
    _engine(
        "structured_outputs_config",
        accepts=({},),
        note="grammars are compiled by llguidance",
    ),
    _engine(
        "swap_space",
        accepts=(ANY,),
        note="nothing is swapped; preempted prompts are computed again",
    ),
    _engine(
        "tokenizer_mode",
        accepts=("auto", "hf"),
        note="the tokenizers of transformers are always used",
    ),
    _engine("tokenizer_revision", note="use a directory that contains the tokenizer instead"),
    _engine(
        "trust_remote_code",
        accepts=(True, False),
        note="no code from a checkpoint is ever run or needed",
        takes="flag",
    ),
)
"""Options of `LLM` and `AsyncLLM`, which the command line also accepts."""

SERVER: tuple[ForeignOption, ...] = (
    *_same("server", "host port uds root_path allowed_media_domains"),
    *_same("server", "default_chat_template_kwargs ssl_keyfile ssl_certfile"),
    *_same("server", "disable_access_log_for_endpoints enable_tokenizer_info_endpoint"),
    _server("api_key", ours="api_keys", note="repeat the option to set several keys"),
    _server(
        "served_model_name",
        ours="served_model_name",
        note="several names may follow; responses contain the first",
        takes="list",
    ),
    _server(
        "config",
        ours="config",
        note="a YAML file of options; the command line takes precedence",
    ),
    _server(
        "tool_call_parser",
        ours="tool_call_parser",
        note="detected from the chat template by default",
    ),
    _server(
        "reasoning_parser",
        ours="reasoning_parser",
        note="detected from the chat template by default",
    ),
    _server("allowed_origins", ours="cors_origins", note="takes a JSON list"),
    _server("log_level", ours="log_level"),
    _server("uvicorn_log_level", ours="log_level"),
    _server("fastapi_root_path", ours="root_path", engine="SGLang"),
    _server("disable_uvicorn_access_log", ours="access_log", takes="flag", inverts=True),
    _server(
        "allow_credentials",
        accepts=(False,),
        note="the server uses no cookies; the API key is sent in a header",
        takes="flag",
    ),
    _server(
        "api_server_count",
        accepts=(1,),
        note="one process serves HTTP; on Ray, --ingresses starts several",
        other_flags=("-asc",),
    ),
    _server(
        "chat_template_content_format",
        accepts=("auto", "openai", "string"),
        note="the form of content that the chat template accepts is detected automatically",
    ),
    _server(
        "disable_log_requests",
        accepts=(True, False),
        note="the contents of requests are never logged",
        takes="flag",
    ),
    _server(
        "enable_log_requests",
        accepts=(False,),
        note="the contents of requests are never logged, but the access log has a line for each "
        "request",
        takes="flag",
    ),
    _server(
        "enable_auto_tool_choice",
        accepts=(True,),
        note="calls are always detected if a request has tools",
        takes="flag",
    ),
    _server(
        "enable_prompt_tokens_details",
        accepts=(True,),
        note="usage always includes the number of cached tokens",
        takes="flag",
    ),
    _server(
        "enable_request_id_headers",
        accepts=(True,),
        note="every response has the header x-request-id",
        takes="flag",
    ),
    _server(
        "enable_server_load_tracking",
        accepts=(True,),
        note="the load is always tracked and served at /load",
        takes="flag",
    ),
    _server(
        "enable_force_include_usage",
        accepts=(False,),
        note="a request can ask for usage with stream_options",
        takes="flag",
    ),
    _server(
        "return_tokens_as_token_ids",
        accepts=(False,),
        note="a request can set the field of this name",
        takes="flag",
    ),
    _server("middleware", note="put a proxy in front of the server instead", takes="list"),
    _server("ssl_ca_certs", note="clients are identified by API keys, not by certificates"),
    _server(
        "ssl_cert_reqs",
        accepts=(0,),
        note="clients are identified by API keys, not by certificates",
    ),
    _server("tool_parser_plugin", accepts=("",), note="the server loads no plugins"),
    _server("trust_request_chat_template", accepts=(False,), takes="flag",
            note="chat templates in requests are never used"),
)  # fmt: skip
"""Options of the server's command line only."""

SAMPLING: tuple[ForeignOption, ...] = (
    _sampling("seed", ours="seed", note="-1 means no seed"),
    _sampling("logprobs", ours="logprobs", note="-1 (the whole vocabulary) is rejected"),
    _sampling("prompt_logprobs", ours="prompt_logprobs", note="-1 is rejected"),
    _sampling(
        "max_tokens",
        ours="max_tokens",
        note="a value that does not fit is rejected; over HTTP, it is lowered",
    ),
    _sampling(
        "truncate_prompt_tokens",
        ours="truncate_prompt_tokens",
        note="the last tokens are always kept",
    ),
    _sampling(
        "logits_processors",
        note=(
            "would run Python code on every step's logits, but the runners are separate "
            "processes; use logit_bias, allowed_token_ids or bad_words instead"
        ),
    ),
    _sampling(
        "best_of",
        accepts=(1,),
        note="was removed from the OpenAI API and vLLM; request n answers and choose one by "
        "cumulative_logprob",
    ),
    # Our tokenizers never insert spaces between special tokens.
    _sampling("spaces_between_special_tokens", accepts=(True, False)),
    *(
        _sampling(name, accepts=(value,))
        for name, value in {
            "extra_args": None,
            "flat_logprobs": False,
            "guided_decoding": None,
            "logprob_token_ids": None,
            "output_text_buffer_length": 0,
            "prompt_logprob_start": None,
            "prompt_logprob_token_ids": None,
            "repetition_detection": None,
            "routed_experts_prompt_start": 0,
            "skip_clone": False,
            "skip_reading_prefix_cache": None,
            "stream_interval": None,
            "thinking_token_budget": None,
            "trace_decode_token_ids": None,
            "watermarking": None,
        }.items()
    ),
)
"""Parameters of vLLM's `SamplingParams`. Fields that are not listed here have the same name and
meaning in nanoactor."""

NAMES: Mapping[str, ForeignOption] = {name.theirs: name for name in (*ENGINE, *SERVER)}
"""All options of `ENGINE` and `SERVER`, by their names in vLLM and SGLang."""
