"""A model loaded on a device."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence

import torch

from nanoactor.models.batch import RowBuffers, SamplingBatch
from nanoactor.models.collective import Group, RankGroup, SingleRank
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices.protocols import Device, WholeStep, WholeSteps
from nanoactor.models.errors import RanksDisagree
from nanoactor.models.families.registry import family_of, layers_of
from nanoactor.models.layers.state import LayerState, paged_caches
from nanoactor.models.model_config import ModelConfig
from nanoactor.models.options import FusedSampling
from nanoactor.models.sampling.sharded import ShardedSampler, gather_logits
from nanoactor.models.vision.tower import VisionTower
from nanoactor.models.weights.checkpoint import CheckpointWeights
from nanoactor.models.weights.headers import check_tensors, requested_bytes
from nanoactor.models.weights.random_weights import RandomWeights
from nanoactor.models.weights.weights import Weights, format_of
from nanoactor.runner.batch.batch import FALLBACK_AT_ONCE, BatchTraits
from nanoactor.runner.config import MIN_LENGTH, MemoryNeeds, RankConfig, check_weights
from nanoactor.runner.model.cache_sizing import CacheSizing
from nanoactor.runner.model.encoder import Encoder
from nanoactor.runner.model.layer_states import slot_bytes
from nanoactor.runner.timing.threads import usable_cores
from nanoactor.setup.actors import encoder_pages

log = logging.getLogger("nanoactor.runner")


class LoadedModel:
    """The part of a model that one tensor-parallel rank has loaded, with its encoder and
    sampler."""

    def __init__(self, config: RankConfig, device: Device) -> None:
        """Load the weights. Raises `ModelError` if the model's files are malformed, and
        `NotEnoughMemory` if the weights do not fit."""
        self._config = config
        self.device = device
        engine, files = config.engine, config.files
        self.threads = engine.threads or max(1, usable_cores() // engine.tensor_parallel_size)
        device.prepare_thread(self.threads)
        self.config: ModelConfig = files.config
        self.pooling = files.pooling
        """The model's pooling configuration; None if it does not pool."""
        self.dtype = self._choose_dtype()
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.block_size = engine.block_size or device.traits.default_block_size
        device.check(self.dtype, self.block_size, self.config.head_dim)
        begin = time.monotonic()
        self.free_bytes = device.memory().free
        """Free memory of the device in bytes before anything was loaded."""
        self.group = self._join_group()
        with torch.inference_mode(), self._open_weights() as weights:
            self._check_weights(weights)
            if isinstance(weights, CheckpointWeights):
                check_tensors(weights, self._make_networks)
            self.network, tower = self._make_networks(weights, device)
            self.encoder = self._make_encoder(tower)
            if isinstance(weights, CheckpointWeights) and config.rank == 0:
                weights.warn_about_unused(self._ignorable_weights())
        self.cache_sizing = CacheSizing(
            config,
            device.traits,
            self.group,
            self.network.states,
            block_size=self.block_size,
            free_bytes=self.free_bytes,
        )
        self._whole: WholeSteps | None = None
        self._sample = device.sample if self.group.size == 1 else self._sharded_sampler()
        device.synchronize()
        seconds = time.monotonic() - begin
        log.info("loaded %s as %s in %.1f s", files.directory, self.dtype, seconds)

    def batch_traits(self, fused: FusedSampling, rows: int) -> BatchTraits:
        """Return the properties that determine the layout of steps. `fused` says which rows the
        device's fused sampler supports, and `rows` is the maximum number of decode rows."""
        heads, kv_heads = self.network.shard.heads.size, self.network.shard.kv_heads.size
        has_slot_state = slot_bytes(self.network.states) > 0
        return BatchTraits(
            self.device.tokens_per_program(heads, kv_heads),
            self.device.traits.needs_host_seq_lens,
            fused,
            FALLBACK_AT_ONCE if self.device.traits.asynchronous else rows,
            # Rows of one sequence in the same step would all start from the same slot state.
            1 << 30 if has_slot_state else self.device.traits.min_rows_for_runs,
            has_slot_state,
        )

    def make_whole_steps(self, sizes: Sequence[int]) -> None:
        """Compile fused decode steps for these numbers of rows, if the device supports them. A
        fused step computes all layers in one operator."""
        engine = self._config.engine
        weights = self.network.weights()
        if weights is None or self.group.size > 1 or not engine.decode_kernel:
            return
        begin = time.monotonic()
        self._whole = self.device.whole_steps(self.config, weights, sizes, self.block_size)
        if self._whole is not None:
            log.info("compiled fused decode steps in %.1f s", time.monotonic() - begin)

    def whole_step(
        self,
        rows: RowBuffers,
        slots: torch.Tensor,
        tables: torch.Tensor,
        states: list[LayerState],
        into: torch.Tensor | None,
    ) -> WholeStep | None:
        """Queue a decode step as one operator (`WholeSteps.run`) and return its results, or None if
        no operator supports this number of rows. Logits are written to `into` unless it is None."""
        if self._whole is None:
            return None
        caches = paged_caches(states)
        assert caches is not None, "only layers with pages have weights for it"
        return self._whole.run(rows, slots, tables, caches, into)

    @contextlib.contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Replace a device error in this context with the error that a failed fused step has
        reported, if any."""
        try:
            yield
        except RuntimeError:
            if self._whole is not None:
                self._whole.raise_if_stopped()
            raise

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Sample token ids, int64 (rows,), from this rank's shard of the logits."""
        return self._sample(logits, batch)

    def gather_logits(self, hidden: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of the whole vocabulary, (rows, vocabulary). With a single rank, they
        are written to `into` unless it is None."""
        logits = self.network.logits(hidden, into)
        if self.group.size == 1:
            return logits
        return gather_logits(self.group, logits, self.config.vocab_size)

    def logits_of(self, hidden: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of the given token ids, float32 (rows, ids)."""
        return self.gather_logits(hidden)[:, list(ids)].float()

    def max_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the maximum logit of each row over all ranks, (rows,). It is NaN if any logit of
        the row is."""
        return self.group.all_gather(logits.amax(-1)).amax(0)

    def _ignorable_weights(self) -> list[str]:
        """Return the names of weights that a checkpoint may contain although the model does not use
        them."""
        # Some checkpoints with tied embeddings store the LM head nevertheless.
        return ["lm_head.weight"] if self.config.tie_embeddings else []

    def _make_networks(
        self, weights: Weights, device: Device
    ) -> tuple[Decoder, VisionTower | None]:
        """Return the decoder and the vision tower with these weights; the tower is None if the
        model accepts no images."""
        files = self._config.files
        decoder = Decoder(
            self.config,
            weights,
            device,
            files.max_model_len if weights.has_values else 1,
            self.group,
            headless=not files.generates,
        )
        if self.config.vision is None or files.images is None:
            return decoder, None
        prefix = family_of(self.config.architecture).vision_prefix
        assert prefix is not None
        return decoder, VisionTower(self.config.vision, weights, device, prefix)

    def _make_encoder(self, tower: VisionTower | None) -> Encoder | None:
        vision, images = self.config.vision, self._config.files.images
        if tower is None or vision is None or images is None:
            return None
        pages = encoder_pages(self._config.engine, self._config.files)
        budget = self._config.engine.max_num_batched_tokens
        return Encoder(
            tower,
            vision,
            images,
            self.device,
            self.dtype,
            videos=self._config.files.videos,
            pages=pages,
            budget=budget,
        )

    def _join_group(self) -> Group:
        config = self._config
        size = config.engine.tensor_parallel_size
        if size == 1:
            return SingleRank()
        port, listener = config.rendezvous_port, config.rendezvous_socket
        backend, torch_device = self.device.traits.collective_backend, self.device.torch_device
        return RankGroup(config.rank, size, backend, port, listener, torch_device)

    def _sharded_sampler(self) -> ShardedSampler:
        vocabulary = self.network.shard.vocabulary
        return ShardedSampler(self.group, vocabulary.start, self.config.vocab_size)

    def _open_weights(self) -> Weights:
        engine, directory = self._config.engine, self._config.files.directory
        packed, torch_device = format_of(self.config.quantization), self.device.torch_device
        if engine.load_format == "dummy":
            return RandomWeights(self.dtype, torch_device, packed)
        return CheckpointWeights(
            directory, self.dtype, torch_device, engine.check_weights, packed=packed
        )

    def _choose_dtype(self) -> torch.dtype:
        if self._config.engine.dtype != "auto":
            return getattr(torch, self._config.engine.dtype)  # type: ignore[no-any-return]
        stored: torch.dtype = getattr(torch, self.config.dtype)
        if self.device.supports(stored):
            return stored
        fallback = self.device.traits.default_dtype
        log.warning(
            "the checkpoint has dtype %s, which is slow on this device: computing in %s",
            stored,
            fallback,
        )
        return fallback

    def _check_weights(self, weights: Weights) -> None:
        """Raise `NotEnoughMemory` if the weights cannot fit, before minutes are spent on loading
        them."""
        config, files, engine = self.config, self._config.files, self._config.engine
        traits = self.device.traits
        is_unpacked = config.quantization is not None and not traits.multiplies_packed
        weights_format = self.dtype_name
        if config.quantization is not None:
            weights_format += ", unpacked on this device," if is_unpacked else " or packed"
        paged_layers = sum(not layer.mixer.keeps_slot_state for layer in layers_of(config))
        needs = MemoryNeeds(
            requested_bytes(weights, self._make_networks, unpacked=is_unpacked),
            weights_format,
            2 * paged_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize,
            MIN_LENGTH if files.is_length_auto else files.max_model_len,
        )
        share = engine.memory_utilization or traits.default_memory_utilization
        if engine.num_kv_blocks is not None:  # may take all that is free
            share = 1.0
        check_weights(needs, self.free_bytes, share, self.group.size, shared=traits.shared_memory)

    def allocate(self, blocks: int, slots: int) -> list[LayerState]:
        """Allocate and return the state of each layer, for `blocks` KV blocks and `slots`
        sequences, including the dummy sequence of padding rows."""
        zeros, size = self.device.zeros, self.block_size
        return [state.allocate(zeros, blocks, size, slots) for state in self.network.states]

    def check_agreement(self, step: int, chosen: torch.Tensor) -> None:
        """Raise `RanksDisagree` unless all ranks have chosen the same tokens in this step. `chosen`
        are the ids that this rank has chosen, int64 (rows,)."""
        weights = torch.arange(1, len(chosen) + 1, device=chosen.device) * 2654435761
        hashes = self.group.all_gather(((chosen + 1) * weights).sum()[None])
        if (hashes != hashes[0]).any():
            raise RanksDisagree(
                f"step {step}: the hashes of the ranks' choices differ: {hashes.tolist()}"
            )
