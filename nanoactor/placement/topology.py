"""Topology of an engine: its actors, their placement in processes, and the edges (message channels)
between them."""

from __future__ import annotations

import os

from nanoactor.admission.admission import DIRECT_TOKENS
from nanoactor.messages.grammar import MAX_REASON, MAX_RUN
from nanoactor.model_files.files import ModelFiles, max_prompt_bytes
from nanoactor.options.config import EngineConfig
from nanoactor.placement.rendezvous import Rendezvous
from nanoactor.requests.grammar_spec import MAX_GRAMMAR_BYTES
from nanoactor.requests.params import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_RULED_IDS,
    MAX_STOP_IDS,
)
from nanoactor.runner.config import SIMULATED, RankConfig
from nanoactor.runtime.ring import ring_capacity
from nanoactor.runtime.topology import ActorSpec, EdgeSpec, NodeSpec, Topology
from nanoactor.setup.actors import (
    MAX_DELTA_BYTES,
    MAX_MASKS_PER_MESSAGE,
    ActorConfig,
    encoder_pages,
    has_grammars,
)
from nanoactor.text.scores import MAX_PIECE

USER = "user"
# Never imported in a control process, because torch alone takes 200 MB and a second.
_HEAVY_MODULES = ("torch", "transformers", "torch_npu")
_MIB = 1 << 20
# Maximum size of a request's rules in bytes: allowed ids, ids with biases, and bad words in two
# spellings each.
_MAX_RULES_BYTES = 12 * MAX_RULED_IDS + 8 * MAX_BAD_WORDS * (MAX_BAD_WORD_TOKENS + 1) + 1024
_MAX_BAD_WORDS_BYTES = 4 * MAX_BAD_WORD_LENGTH * MAX_BAD_WORDS
# If cores are scarce, control and runner processes run first: a late step delays all sequences,
# whereas late text delays nothing else. The detokenizer merges output that it cannot send in time.
_DETOKENIZER_NICE = 10
# A late mask delays only the requests with a grammar.
_GRAMMAR_NICE = 15
# Decoding of images may be even later.
_VISION_NICE = 19
# Capacity of an edge for pieces of images or pixels, in bytes, because that much is copied at once.
_PIXEL_EDGE_BYTES = 4 << 20
# Gloo and NCCL use the loopback interface, unless the environment names another one.
_LOOPBACK_INTERFACE = "lo"
_MIN_DEFAULT_BLOCK_SIZE = 16


# On import, NumPy's OpenBLAS starts a thread per core, which takes a large part of a process's
# startup time. None of our processes multiplies matrices with NumPy.
LIGHT_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}


def engine_topology(config: ActorConfig, rendezvous: Rendezvous | None = None) -> Topology:
    """Return the topology of an engine: its actors, processes and edges (message channels).
    docs/architecture.md has a diagram.

    `rendezvous` is the socket through which the runners find each other; None for a single runner.
    """
    engine, files = config.engine, config.files
    tokenizers = [f"tokenizer.{index}" for index in range(engine.num_tokenizers)]
    workers = engine.num_vision_workers if files.images is not None else 0
    vision = [f"vision.{index}" for index in range(workers)]
    return Topology(
        _actors(config, tokenizers, vision, rendezvous),
        _nodes(config, tokenizers, vision, rendezvous),
        _edges(engine, files, tokenizers, vision),
        USER,
    )


def _actors(
    config: ActorConfig,
    tokenizers: list[str],
    vision: list[str],
    rendezvous: Rendezvous | None,
) -> tuple[ActorSpec, ...]:
    rank_configs = [
        _rank_config(config, r, rendezvous) for r in range(config.engine.tensor_parallel_size)
    ]
    package = "nanoactor.actors"
    return (
        ActorSpec("frontend", f"{package}.frontend:FrontendActor", config),
        *(ActorSpec(name, f"{package}.tokenizer:TokenizerActor", config) for name in tokenizers),
        *(ActorSpec(name, f"{package}.vision:VisionActor", config) for name in vision),
        ActorSpec("scheduler", f"{package}.scheduler:SchedulerActor", config),
        ActorSpec("blocks", f"{package}.blocks:BlockManagerActor", config),
        *(
            ActorSpec(f"runner.{rank}", f"{package}.runner:RunnerActor", rank_config)
            for rank, rank_config in enumerate(rank_configs)
        ),
        ActorSpec("detokenizer", f"{package}.detokenizer:DetokenizerActor", config),
        *(
            ActorSpec(name, f"{package}.grammar:GrammarActor", config)
            for name in _grammar_actors(config)
        ),
    )


def _grammar_actors(config: ActorConfig) -> tuple[str, ...]:
    """Return the name of the actor that computes grammar masks, or an empty tuple if there is
    none."""
    return ("grammar",) if has_grammars(config.files) else ()


def _rank_config(config: ActorConfig, rank: int, rendezvous: Rendezvous | None) -> RankConfig:
    if rendezvous is None:
        return RankConfig(config, rank)
    return RankConfig(config, rank, rendezvous.port, rendezvous.descriptor if rank == 0 else None)


def _nodes(
    config: ActorConfig,
    tokenizers: list[str],
    vision: list[str],
    rendezvous: Rendezvous | None,
) -> tuple[NodeSpec, ...]:
    engine, grammar = config.engine, _grammar_actors(config)
    if engine.placement == "single":
        other_actors = ("scheduler", "blocks", "detokenizer", *grammar, "runner.0")
        return (NodeSpec(USER, ("frontend", *tokenizers, *vision, *other_actors)),)
    runner_blocked_modules: tuple[str, ...] = ("tokenizers", "transformers", "jinja2")
    if engine.device.startswith(SIMULATED):
        runner_blocked_modules += _HEAVY_MODULES
    control: dict[str, tuple[str, ...]] = {"control": ("scheduler", "blocks")}
    if engine.placement == "split":
        control = {"scheduler": ("scheduler",), "blocks": ("blocks",)}
    return (
        NodeSpec(USER, ("frontend",), wakes_early=True),
        *(
            NodeSpec(name, (name,), LIGHT_ENVIRONMENT, _HEAVY_MODULES, wakes_early=True)
            for name in tokenizers
        ),
        *(
            NodeSpec(name, (name,), LIGHT_ENVIRONMENT, _HEAVY_MODULES, nice=_VISION_NICE)
            for name in vision
        ),
        *(
            NodeSpec(n, actors, LIGHT_ENVIRONMENT, _HEAVY_MODULES, wakes_early=True)
            for n, actors in control.items()
        ),
        NodeSpec(
            "detokenizer",
            ("detokenizer",),
            LIGHT_ENVIRONMENT,
            _HEAVY_MODULES,
            nice=_DETOKENIZER_NICE,
            wakes_early=True,
        ),
        *(
            NodeSpec(name, (name,), LIGHT_ENVIRONMENT, _HEAVY_MODULES, nice=_GRAMMAR_NICE)
            for name in grammar
        ),
        *_runner_nodes(engine, runner_blocked_modules, rendezvous),
    )


def _runner_nodes(
    config: EngineConfig, blocked_modules: tuple[str, ...], rendezvous: Rendezvous | None
) -> list[NodeSpec]:
    # Idle OpenMP threads sleep, because the control actors need the cores. Between the operators of
    # a step, they keep spinning: waking a thread takes longer than many operators.
    environment = {
        **LIGHT_ENVIRONMENT,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "10000",
        "KMP_BLOCKTIME": "1",
        # oneDNN caches two entries of 0.27 MiB for each number of rows with which a linear layer's
        # shape was used, up to 1024 entries. Above it, PyTorch has another cache of 1024 entries of
        # 0.27 MiB, which saves a few microseconds per call. The shapes of one step must fit into
        # these caches, because all layers use the same shapes.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        "LRU_CACHE_CAPACITY": "16",
        **_ascend_environment(config),
    }
    if config.tensor_parallel_size > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        environment["GLOO_SOCKET_IFNAME"] = _LOOPBACK_INTERFACE
    if config.tensor_parallel_size > 1 and "NCCL_SOCKET_IFNAME" not in os.environ:
        environment["NCCL_SOCKET_IFNAME"] = _LOOPBACK_INTERFACE
    nodes = []
    for rank in range(config.tensor_parallel_size):
        name = f"runner.{rank}"
        inherited = (rendezvous.descriptor,) if rendezvous and rank == 0 else ()
        group = "ranks" if config.tensor_parallel_size > 1 else ""
        nodes.append(
            NodeSpec(
                name,
                (name,),
                environment,
                blocked_modules,
                inherited,
                wakes_early=True,
                group=group,
            )
        )
    return nodes


def _ascend_environment(config: EngineConfig) -> dict[str, str]:
    """Return the environment variables that torch_npu and CANN read when they are loaded. Variables
    that are already set are omitted."""
    variables = {
        # Submit operators to the device from a separate thread.
        "TASK_QUEUE_ENABLE": "1",
        # Choose free ports, because several engines may share a host.
        "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
        "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    }
    if config.device != "auto" and not config.device.startswith("npu"):
        variables = {}
    return {name: value for name, value in variables.items() if name not in os.environ}


def _edges(
    config: EngineConfig, files: ModelFiles, tokenizers: list[str], vision: list[str]
) -> tuple[EdgeSpec, ...]:
    """Return all edges (message channels). The ring buffer of each edge holds at least two messages
    of the largest possible size.

    Rings are sized for the worst case, because memory that is never touched costs nothing.
    """
    max_len, max_seqs = files.max_model_len, config.max_num_seqs
    rules_bytes = _MAX_RULES_BYTES + MAX_GRAMMAR_BYTES * (files.tokenizer_directory is not None)
    # Text or token ids, template options, and stop strings.
    prompt = ring_capacity(
        2 * max_prompt_bytes(files) + 4 * max_len + rules_bytes + _MAX_BAD_WORDS_BYTES + _MIB
    )
    # Token ids, the hash of every block, and stop strings.
    token_bytes = 20 + 64 * bool(vision)
    admitted = ring_capacity(token_bytes * max_len + rules_bytes + _MIB)
    direct = ring_capacity(20 * min(max_len, DIRECT_TOKENS) + _MIB)
    # A step may admit all sequences with their full block tables, if their prefixes are cached.
    block_table_bytes = 4 * -(-max_len // (config.block_size or _MIN_DEFAULT_BLOCK_SIZE))
    row_bytes = (
        192 + _MAX_RULES_BYTES + 4 * (MAX_STOP_IDS + len(files.eos_token_ids)) + block_table_bytes
    )
    # Token id, id of the next token for scoring, rotary positions, and row in the encoder cache.
    input_token_bytes = 8 + 24 * bool(vision)
    step_bytes = (
        max_seqs * row_bytes + input_token_bytes * config.max_num_batched_tokens + 64 * 1024
    )
    step = ring_capacity(step_bytes)
    # A step admits as many sequences as its token budget allows, and the last one may have any
    # length.
    turn = ring_capacity(token_bytes * (max_len + config.max_num_batched_tokens) + step_bytes)
    logprobs_bytes = (max_seqs + config.max_num_batched_tokens) * (32 + 8 * config.max_logprobs)
    vectors_bytes = (
        4 * files.pooling.width(files.config.hidden_size) * max_seqs if files.pooling else 0
    )
    tokens = ring_capacity(
        (512 + 16 * MAX_RUN) * max_seqs + logprobs_bytes + vectors_bytes + 64 * 1024
    )
    # A budget in bytes, but at least the log-probabilities of one token.
    token_logprobs_bytes = (config.max_logprobs + 1) * (MAX_PIECE + 32)
    chunk = ring_capacity(4 * MAX_DELTA_BYTES + 4 * max_len + token_logprobs_bytes)
    small = ring_capacity(64 * 1024 + 64 * max_seqs)
    pages = encoder_pages(config, files)
    runners = tuple(f"runner.{rank}" for rank in range(config.tensor_parallel_size))
    # With images or masks, every runner reports which ones it has received. Otherwise, only one
    # runner reports.
    reporting_runners = runners if vision or has_grammars(files) else runners[:1]
    # Each cycle of edges contains one whose outbox the protocol bounds: to one message into which
    # updates (credits, stops, chunks) are merged, or to a multiple of the number of steps in
    # flight.
    return (
        *(EdgeSpec("frontend", (t,), prompt) for t in tokenizers),
        *(EdgeSpec(t, ("scheduler",), admitted) for t in tokenizers),
        EdgeSpec("frontend", ("scheduler",), max(small, direct)),
        EdgeSpec("scheduler", ("blocks",), turn),
        EdgeSpec(
            "blocks", ("scheduler",), ring_capacity(64 * 1024 + 64 * (max_seqs + pages)), bound=1
        ),
        EdgeSpec("blocks", runners, step, name="runners"),
        *_index_edge(config),
        *(
            EdgeSpec(runner, ("scheduler",), tokens, bound=4 * config.steps_in_flight(deep=True))
            for runner in reporting_runners
        ),
        *_vision_edges(tokenizers, vision, runners, small),
        *_grammar_edges(config, files, runners, small),
        EdgeSpec("scheduler", ("detokenizer",), max(admitted, tokens)),
        EdgeSpec("detokenizer", ("scheduler",), prompt, bound=1),
        EdgeSpec("detokenizer", ("frontend",), chunk, bound=1, paced=True),
    )


def _index_edge(config: EngineConfig) -> list[EdgeSpec]:
    """Return the edge (message channel) for updates on which prefixes are cached. Updates are
    merged while the edge is full. Return an empty list if `prefix_salt` is None."""
    if config.prefix_salt is None:
        return []
    return [EdgeSpec("blocks", ("frontend",), ring_capacity(256 * 1024), bound=1)]


def _grammar_edges(
    config: EngineConfig, files: ModelFiles, runners: tuple[str, ...], small: int
) -> list[EdgeSpec]:
    """Return the edges (message channels) of the grammar actor; empty if requests cannot use
    grammars. On edges with a bound, messages are merged while the edge is full."""
    if not has_grammars(files):
        return []
    open_bytes = ring_capacity(MAX_GRAMMAR_BYTES + 4 * files.max_model_len + 64 * 1024)
    mask_bytes = 4 * -(-files.config.vocab_size // 32)
    masks = ring_capacity(MAX_MASKS_PER_MESSAGE * mask_bytes + 64 * config.max_num_seqs + 64 * 1024)
    failure_bytes = 4 * MAX_REASON + 4 * MAX_RUN + 64
    failures_bytes = ring_capacity(failure_bytes * config.max_num_seqs + 64 * 1024)
    return [
        EdgeSpec("scheduler", ("grammar",), open_bytes),
        EdgeSpec("grammar", ("scheduler",), max(small, failures_bytes), bound=1),
        EdgeSpec("grammar", runners, masks, name="runners", bound=1),
    ]


def _vision_edges(
    tokenizers: list[str], vision: list[str], runners: tuple[str, ...], small: int
) -> list[EdgeSpec]:
    """Return the edges (message channels) of the vision workers. On edges with a bound, messages
    are merged while the edge is full."""
    edges = []
    for worker in vision:
        edges += [
            EdgeSpec("frontend", (worker,), _PIXEL_EDGE_BYTES),
            EdgeSpec("scheduler", (worker,), small),
            EdgeSpec(worker, ("frontend",), small, bound=1),
            EdgeSpec(worker, ("scheduler",), small, bound=1),
            EdgeSpec(worker, runners, _PIXEL_EDGE_BYTES, name="runners", bound=1),
            *(EdgeSpec(worker, (tokenizer,), small, bound=1) for tokenizer in tokenizers),
        ]
    return edges
