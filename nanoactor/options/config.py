"""The configuration of an engine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from nanoactor.errors import InvalidConfig
from nanoactor.models.config import DTYPES
from nanoactor.models.options import (
    ATTENTION_LAYOUTS,
    GRAPH_MODES,
    WEIGHT_FORMATS,
    DeviceOptions,
)
from nanoactor.options.pooling import POOLING_METHODS
from nanoactor.options.traces_endpoint import check_traces_endpoint
from nanoactor.requests.params import make_numbers_plain

_MIN_STALL_TIMEOUT = 1.0
_MAX_SHORT_STEPS = 4
"""Maximum number of steps in flight (planned but not finished) while a step takes less time on the
device than on the host (about half a millisecond)."""
_MAX_MAX_LOGPROBS = 1000
"""Maximum value of `max_logprobs`. The scores of all tokens of a step must fit into one message."""
Placement = Literal["default", "split", "single"]


def simulated_times(device: str) -> tuple[float, float]:
    """Return the step times of a simulated device: milliseconds per step, and microseconds per
    token. Return (0, 0) for a malformed name."""
    base, plus, per_token = device.removeprefix("simulated:").partition("+")
    try:
        return float(base), float(per_token) if plus else 0.0
    except ValueError:
        return 0.0, 0.0


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Options of an engine. The constructor raises `InvalidConfig`, naming the invalid option."""

    model: str
    """The model: a directory, `demo`, `demo-vl`, or a name on the Hugging Face hub."""
    tokenizer: str | None = None
    """Location of the tokenizer and chat template, in the same form as that of the model. Default:
    the location of the model."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. Default: its main branch."""
    download_dir: str | None = None
    """Directory into which models are downloaded. Default: the Hugging Face cache."""
    chat_template: str | None = None
    """A file with the chat template for conversations, or the template itself.
    Default: the model's own."""
    generation_config: str = "auto"
    """"auto": parameters that a request omits take the values recommended by the model's
    `generation_config.json`. "vllm": vLLM's sampling defaults. Otherwise, a directory with another
    such file."""
    override_generation_config: Mapping[str, Any] | None = None
    """Settings that override those of `generation_config.json`, such as {"temperature": 0.5}."""
    device: str = "auto"
    """"auto" selects a GPU if PyTorch sees one, otherwise an NPU, otherwise the CPU. Other values:
    "cpu", "cuda" (one GPU per rank), "cuda:N", "npu", "npu:N", and "simulated:MS", whose steps take
    MS milliseconds and compute nothing, to measure the overhead of the engine itself. With
    "simulated:MS+US", each token of a step takes another US microseconds, so that cached prefixes
    save time."""
    load_format: Literal["auto", "dummy"] = "auto"
    """"auto" reads the checkpoint. "dummy" uses random weights, for benchmarks; with
    skip_tokenizer_init, the directory needs only a config.json."""
    dtype: str = "auto"
    """"auto" keeps the checkpoint's own dtype if the device supports it, and otherwise uses the
    device's default; "half" means float16, and "float" means float32."""
    check_weights: bool = True
    """Refuse weights that contain NaN or infinity. This check reads every value during loading."""
    max_model_len: int | Literal["auto"] | None = None
    """Maximum length of prompt plus output. Default: the maximum that the model's configuration
    allows. "auto" or -1 lowers this maximum if the KV cache cannot hold that many tokens."""
    max_num_seqs: int = 256
    """Maximum number of sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Maximum number of tokens in a step. A lower value shortens the longest gap between two tokens
    of a stream."""
    block_size: int | None = None
    """Number of tokens in a KV block. Default: depends on the device."""
    num_kv_blocks: int | None = None
    """Number of blocks in the KV cache. Default: as many as `memory_utilization` allows."""
    memory_utilization: float | None = None
    """Share of the memory free at startup that weights and KV cache may use. Default: depends on
    the device."""
    encoder_cache_tokens: int | None = None
    """Capacity of the encoder cache, in image tokens; the largest request must fit. Default: 16384,
    or max_model_len if that is less."""
    num_vision_workers: int = 1
    """Number of processes that decode images, for vision models."""
    max_image_pixels: int = 64_000_000
    """Images with more pixels are rejected before they are decoded."""
    limit_mm_per_prompt: Mapping[str, int] | None = None
    """Maximum numbers of images and videos in a request, such as {"image": 4, "video": 1}. Default:
    as many as fit."""
    enable_prefix_caching: bool = True
    """Keep KV blocks after a request ends, so that common prefixes are computed once."""
    enforce_eager: bool = False
    """Capture no graphs on a GPU or an NPU, for debugging: the engine starts faster but runs
    slower."""
    decode_kernel: bool = True
    """On a Hopper GPU, run decode steps of up to 16 rows as one kernel, if the model allows it."""
    graph_mode: str = "auto"
    """On an NPU, how decode steps run: "npugraph" (recorded natively; the default), "max-autotune"
    (compiled by torchair's graph engine), "reduce-overhead" (recorded by torchair) or "eager"."""
    attention_layout: str = "tnd"
    """On an NPU, the layout of queries for fused attention: "tnd" (packed) or "bnsd" (padded)."""
    weight_format: str = "nd"
    """On an NPU, the layout of weights: "nd" (row by row) or "nz" (that of the matrix units)."""
    graph_cache_dir: str | None = None
    """On an NPU, the directory for compiled graphs. Default: nanoactor/graphs in the user's cache
    directory."""
    pipeline_depth: int = 2
    """Maximum number of steps that are planned but not finished. 1 plans a step after the previous
    one is processed; 2 overlaps the two."""
    max_pipeline_depth: int | None = None
    """Same as `pipeline_depth`, but for steps that take the device less time than they take the
    host. Default: 4 on NVIDIA GPUs, unless `pipeline_depth` is 1; elsewhere
    `pipeline_depth`."""
    plan_lead: Literal["eager", "late"] = "eager"
    """"eager" plans the next step as soon as the depth allows. "late" waits until the runner is
    about to run out of work, so that requests that arrive in the meantime join it."""
    priority_window: int = 1000
    """Lower priority values run first. A request whose priority value is higher by d is overtaken
    by fewer than d times this many later requests, so that none starves."""
    max_logprobs: int = 20
    """Maximum number of top log-probabilities that a request may ask for per token."""
    pooling: str = "auto"
    """Pooling method: "auto" follows the checkpoint's `modules.json`, if there is one. "last" and
    "cls" take the state of the last or first token, "mean" the mean over all tokens; "yes_no"
    scores pairs as Qwen3-Reranker does; "none" disables pooling."""
    num_tokenizers: int = 1
    """Number of processes that tokenize prompts."""
    template_timeout: float = 5.0
    """Seconds of CPU time that the model's chat template may take for a conversation."""
    mask_timeout: float = 30.0
    """Seconds that a grammar may take to produce the mask of a sequence's next token, compilation
    included; a sequence that waits longer ends with `ComputationFailed`."""
    hold_timeout: float = 60.0
    """Minimum number of seconds for which paused sequences (beam search) wait for their caller to
    resume them. After that, they end with `HoldExpired`."""
    jump_forward: bool = True
    """Append tokens without sampling where a grammar leaves only one choice."""
    tensor_parallel_size: int = 1
    """Number of processes among which each layer is divided; must divide the number of attention
    heads evenly."""
    threads: int | None = None
    """Number of CPU threads of a runner. Default: the cores that affinity and the container's quota
    allow, divided among the ranks; a single rank uses one thread for steps that are faster that
    way."""
    seed: int | None = None
    """Seed from which the seeds of requests without a seed are derived, so that runs are
    reproducible."""
    prefix_salt: bytes | None = dataclasses.field(default=None, repr=False)
    """Key of the prefix cache's hashes, 16 to 64 random bytes: a secret shared by engines and the
    router that tracks their caches (`AsyncLLM.index_events`). Default: random, and never
    disclosed."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, and outputs have no text."""
    max_waiting_requests: int = 10_000
    """Maximum number of requests that wait for their first token; additional requests raise
    `EngineOverloaded`."""
    max_waiting_tokens: int = 50_000_000
    """Maximum number of prompt tokens in requests that wait for their first token. Each byte of a
    text counts as one token until the text is tokenized."""
    max_waiting_media_bytes: int = 4 << 30
    """Maximum number of bytes of images and videos, before they are decoded, in requests that wait
    for their first token."""
    placement: Placement = "default"
    """"default": scheduler and block manager share a process. "split": a process for each
    actor. "single": everything in this process, for debugging or for use inside another program."""
    transport: Literal["ring", "queue"] = "ring"
    """How messages pass between processes: "ring" uses shared-memory rings; "queue" uses pipes,
    which are slower."""
    awake_ms: float | None = None
    """Milliseconds for which an idle process, once notified that a request or its first token is on
    its way, polls for messages before it sleeps again; 0: no polling. Default: 3 if there are at
    least two cores for each process, else 0."""
    start_timeout: float = 600.0
    """Seconds within which every process must be ready. After 30 s the log names the late ones."""
    stop_timeout: float = 5.0
    """Seconds that a process may take to end before it is killed."""
    stall_timeout: float | None = 60.0
    """Seconds without progress, while there are requests, after which a stalled process is killed
    and all stacks are logged. "none" (None in Python): no process is killed for this reason."""
    max_restarts: int = 5
    """Maximum number of process deaths within `restart_window` from which the engine recovers: the
    process is replaced, and streams resume. One more kills the engine, and requests raise
    `EngineDead`. 0: the first death kills the engine, as it always does with `debug_record_dir`."""
    restart_window: float = 300.0
    """Length of the window for counting restarts, in seconds."""
    otlp_traces_endpoint: str | None = None
    """URL to which OpenTelemetry spans of requests are sent, as protobuf over HTTP, such as
    http://localhost:4318/v1/traces. Requires the extra `otel`. Default: no spans."""
    debug: bool = False
    """Check every record's checksum and overwrite released memory, which is slow."""
    debug_delay_ms: float = 0.0
    """Delay every message by a random time of up to this many milliseconds."""
    debug_record_dir: str | None = None
    """An existing directory in which every actor records the messages it receives and sends;
    `nanoactor.runtime.recording.replay` replays the scheduler and the block manager."""

    def __post_init__(self) -> None:
        """Check all options. Limits that depend on the model are checked later."""
        make_numbers_plain(self)
        for name in ("model", "device"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise InvalidConfig(
                    f"{name} must be a non-empty string, got {getattr(self, name)!r}"
                )
        flags = (
            "jump_forward",
            "check_weights",
            "enable_prefix_caching",
            "enforce_eager",
            "decode_kernel",
            "skip_tokenizer_init",
        )
        for name in (*flags, "debug"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfig(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("block_size", "num_kv_blocks", "threads"):
            self._check_positive_integer(name, optional=True)
        self._check_positive_integer("encoder_cache_tokens", optional=True)
        self._check_positive_integer("max_pipeline_depth", optional=True)
        self._check_positive_integer("num_vision_workers")
        self._check_positive_integer("max_image_pixels")
        self._check_media_limits()
        for name in ("max_num_seqs", "max_num_batched_tokens", "pipeline_depth", "num_tokenizers"):
            self._check_positive_integer(name)
        self._check_positive_integer("tensor_parallel_size")
        self._check_positive_integer("max_logprobs")
        for name in ("requests", "tokens", "media_bytes"):
            self._check_positive_integer(f"max_waiting_{name}")
        self._check_positive_integer("priority_window")
        for name in ("start", "stop", "template", "mask", "hold"):
            self._check_number(f"{name}_timeout", 1e9)
        self._check_number("debug_delay_ms", 1e9)
        self._check_number("awake_ms", 1000, optional=True)
        self._check_restarts()
        self._check_model_options()
        self._check_salt()
        self._check_choice("plan_lead", ("eager", "late"))
        self._check_choice("pooling", POOLING_METHODS)
        self._check_choice("placement", get_args(Placement))
        self._check_choice("transport", ("ring", "queue"))
        self._check_choice("graph_mode", GRAPH_MODES)
        self._check_choice("attention_layout", ATTENTION_LAYOUTS)
        self._check_choice("weight_format", WEIGHT_FORMATS)
        if self.debug_record_dir is not None and not (
            isinstance(self.debug_record_dir, str) and os.path.isdir(self.debug_record_dir)
        ):
            raise InvalidConfig(
                f"debug_record_dir must be an existing directory, got {self.debug_record_dir!r}"
            )
        check_traces_endpoint(self.otlp_traces_endpoint)
        self._check_simulated()
        self._check_npu()
        self._check_combinations()

    def _check_model_options(self) -> None:
        dtype = {"half": "float16", "float": "float32"}.get(str(self.dtype), self.dtype)
        object.__setattr__(self, "dtype", dtype)
        self._check_choice("dtype", ("auto", *DTYPES))
        self._check_choice("load_format", ("auto", "dummy"))
        if self.max_model_len == -1:
            object.__setattr__(self, "max_model_len", "auto")
        if self.max_model_len != "auto":
            self._check_positive_integer("max_model_len", optional=True)
        overrides = self.override_generation_config
        if overrides is not None and not isinstance(overrides, Mapping):
            raise InvalidConfig(f"override_generation_config must be a dict, got {overrides!r:.80}")
        if not isinstance(self.generation_config, str):
            raise InvalidConfig(
                f"generation_config must be a string, got {self.generation_config!r}"
            )
        for name in ("tokenizer", "revision", "download_dir", "chat_template", "generation_config"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidConfig(
                    f"{name} must be a non-empty string or None, got {value!r:.100}"
                )

    def _check_salt(self) -> None:
        salt = self.prefix_salt
        if salt is not None and (not isinstance(salt, bytes) or not 16 <= len(salt) <= 64):
            # The value is secret, so it is not shown.
            raise InvalidConfig("prefix_salt must be bytes with a length of 16 to 64, or None")

    def _check_media_limits(self) -> None:
        limits = self.limit_mm_per_prompt
        if limits is None:
            return
        if not isinstance(limits, Mapping) or set(limits) - {"image", "video"}:
            raise InvalidConfig(
                "limit_mm_per_prompt must be a dict with only the keys 'image' and 'video', "
                f"such as {{'image': 4, 'video': 1}}, got {limits!r:.80}"
            )
        for count in limits.values():
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise InvalidConfig(
                    "limit_mm_per_prompt must contain only integers of at least 0, got "
                    f"{count!r:.50}"
                )

    def _check_restarts(self) -> None:
        if self.max_restarts != 0 or isinstance(self.max_restarts, bool):
            self._check_positive_integer("max_restarts")
        self._check_number("restart_window", 1e9)
        if self.stall_timeout is not None:
            self._check_number("stall_timeout", 1e9)
            if self.stall_timeout < _MIN_STALL_TIMEOUT:
                raise InvalidConfig(
                    f"stall_timeout must be at least {_MIN_STALL_TIMEOUT:g} s, or none, got "
                    f"{self.stall_timeout!r}"
                )

    def _check_simulated(self) -> None:
        if self.device.startswith("simulated"):
            milliseconds, microseconds = simulated_times(self.device)
            if not 0 < milliseconds <= 10_000 or not 0 <= microseconds <= 10_000:
                raise InvalidConfig(
                    f"device {self.device!r} is not valid; write 'simulated:5' for steps of 5 "
                    "milliseconds (more than 0, at most 10000), or 'simulated:5+20' for "
                    "another 20 microseconds per token (at most 10000)"
                )

    def _check_npu(self) -> None:
        directory = self.graph_cache_dir
        if directory is not None and (not isinstance(directory, str) or not directory):
            raise InvalidConfig(
                f"graph_cache_dir must be the path of a directory, got {directory!r}"
            )
        if self.enforce_eager and self.graph_mode not in ("auto", "eager"):
            raise InvalidConfig(
                f"graph_mode {self.graph_mode!r} cannot be combined with enforce_eager, "
                "which captures no graphs"
            )
        if self.device == "auto" or self.device.startswith("npu"):
            return
        for name, defaults in (
            ("graph_mode", ("auto", "eager")),
            ("attention_layout", ("tnd",)),
            ("weight_format", ("nd",)),
            ("graph_cache_dir", (None,)),
        ):
            if getattr(self, name) not in defaults:
                raise InvalidConfig(
                    f"{name} {getattr(self, name)!r} is supported only on NPUs, but device is "
                    f"{self.device!r}"
                )

    def _check_combinations(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), because each running sequence needs one "
                "token in a step"
            )
        if self.max_pipeline_depth is not None and self.max_pipeline_depth < self.pipeline_depth:
            raise InvalidConfig(
                f"max_pipeline_depth ({self.max_pipeline_depth}) must be at least pipeline_depth "
                f"({self.pipeline_depth})"
            )
        if self.memory_utilization is not None:
            self._check_number("memory_utilization", 1.0)
            if not self.memory_utilization:
                raise InvalidConfig("memory_utilization must be greater than 0 and at most 1")
        if self.max_logprobs > _MAX_MAX_LOGPROBS:
            raise InvalidConfig(
                f"max_logprobs must be at most {_MAX_MAX_LOGPROBS}, got {self.max_logprobs}"
            )
        if self.seed is not None and type(self.seed) is not int:
            raise InvalidConfig(f"seed must be an integer or None, got {self.seed!r}")
        for kind, variable in (
            ("cuda", "CUDA_VISIBLE_DEVICES"),
            ("npu", "ASCEND_RT_VISIBLE_DEVICES"),
        ):
            if self.tensor_parallel_size > 1 and self.device.startswith(f"{kind}:"):
                raise InvalidConfig(
                    f"device {self.device!r} is a single device, but each of "
                    f"{self.tensor_parallel_size} ranks needs its own; use device {kind!r} and "
                    f"select the devices with {variable}"
                )
        if self.tensor_parallel_size > 1 and self.placement == "single":
            raise InvalidConfig(
                "placement 'single' uses only one process, but tensor_parallel_size "
                f"{self.tensor_parallel_size} requires a process for each rank"
            )

    @property
    def device_options(self) -> DeviceOptions:
        """Options that apply to only one kind of device."""
        mode = "eager" if self.enforce_eager else self.graph_mode
        return DeviceOptions(mode, self.attention_layout, self.weight_format, self.graph_cache_dir)

    @property
    def restarts_allowed(self) -> int:
        """Maximum number of restarts: `max_restarts`, or 0 if messages are recorded, because a
        recording cannot span a restart."""
        return self.max_restarts if self.debug_record_dir is None else 0

    def steps_in_flight(self, *, deep: bool) -> int:
        """Return the maximum number of steps in flight (planned but not finished). `deep` is True
        if the device supports more than `pipeline_depth` steps in flight as long as steps are
        short."""
        if self.max_pipeline_depth is not None:
            return self.max_pipeline_depth
        is_deeper = deep and self.pipeline_depth > 1
        return max(self.pipeline_depth, _MAX_SHORT_STEPS) if is_deeper else self.pipeline_depth

    def _check_positive_integer(self, name: str, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidConfig(f"{name} must be a positive integer, got {value!r}")

    def _check_number(self, name: str, maximum: float, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 <= value <= maximum
        ):
            raise InvalidConfig(f"{name} must be a number from 0 to {maximum:g}, got {value!r}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise InvalidConfig(f"{name} must be one of {', '.join(choices)}, got {value!r}")
