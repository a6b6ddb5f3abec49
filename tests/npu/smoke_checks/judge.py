"""What is right where roundings decide: a small model's logits on the CPU device in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from nanoactor.models.batch import AttentionBatch, ForwardInputs, KVCache
from nanoactor.models.config import read_config
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices.cpu.device import CPUDevice
from nanoactor.models.devices.protocols import Device
from nanoactor.models.seq_lens import HostSeqLens
from nanoactor.models.weights.checkpoint import CheckpointWeights
from tests.npu.smoke_checks.frame import BLOCK, Failed, Rig

MODEL: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=1024,
)
CLEAR = 0.25
"""Logits that differ by less, as a share of their deviation, may change places in 16 bits."""


def checkpoint(rig: Rig) -> Path:
    """Random weights in the device's type, written once for all checks of a run."""
    from tests.models.checkpoints import make_checkpoint

    directory = rig.scratch / "model"
    if not (directory / "written").exists():
        make_checkpoint(directory, dtype=rig.dtype, **MODEL)
        (directory / "written").touch()
    return directory


class Model:
    """A checkpoint on a device, without an engine."""

    def __init__(self, directory: Path, device: Device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._config = read_config(directory)
        with (
            torch.inference_mode(),
            CheckpointWeights(directory, dtype, device.torch_device) as weights,
        ):
            positions = self._config.max_positions
            self._network = Decoder(self._config, weights, device, positions)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 (tokens, vocabulary), on the host: all of a sequence as one prompt."""
        where, count = self._device.torch_device, len(tokens)
        blocks, config = -(-count // BLOCK), self._config
        sizes = (blocks, BLOCK, config.num_kv_heads, config.head_dim)
        with torch.inference_mode():
            caches = [
                KVCache(*(torch.zeros(sizes, dtype=self._dtype, device=where) for _ in range(2)))
                for _ in range(config.num_layers)
            ]
            places = torch.arange(count, device=where)
            rows = torch.tensor([[0], [0], [count], [count]], dtype=torch.int32, device=where)
            none = rows[0, :0]
            batch = AttentionBatch(
                places,
                torch.arange(blocks, dtype=torch.int32, device=where)[None],
                BLOCK,
                prefill_tokens=count,
                prefill_rows=rows,
                prefill_tiles=rows[:2],
                decode_slots=none,
                decode_contexts=none,
                lengths=HostSeqLens([count], [count], []),
            )
            batch = self._device.plan(None, batch)
            ids = torch.tensor(tokens, device=where)
            hidden = self._network.forward(ForwardInputs(ids, places, caches, batch))
            return self._network.logits(hidden).float().cpu()


@dataclasses.dataclass
class Judge:
    """Compares tokens."""

    model: Model
    prompts: list[list[int]]

    def _behind(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """(output, vocabulary), in deviations: what each token was chosen from."""
        logits = self.model.logits([*prompt, *output])[len(prompt) - 1 : -1]
        return logits / logits.std(-1, keepdim=True)

    def right(self, found: list[list[int]]) -> str:
        """Every token is the likeliest, or nearly. Raises `Failed`."""
        unclear = count = 0
        for number, (prompt, output) in enumerate(zip(self.prompts, found, strict=True)):
            logits = self._behind(prompt, output)
            chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            short = logits.amax(-1) - chosen
            if (short > CLEAR).any():
                at = int((short > CLEAR).nonzero()[0])
                raise Failed(
                    f"prompt {number} ({len(prompt)} tokens), token {at}: {output[at]}, where "
                    f"float32 prefers {int(logits[at].argmax())} by {float(short[at]):.2f} "
                    "deviations"
                )
            unclear, count = unclear + int((short > 0).sum()), count + len(output)
        return f"{count - unclear} of {count} tokens are float32's, the rest within {CLEAR}"

    def equal(self, found: list[list[int]], expected: list[list[int]], whose: str) -> str:
        """The same, or apart from where float32 sees no clear difference. Raises `Failed`."""
        apart = 0
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            if one == other:
                continue
            pairs = enumerate(zip(one, other, strict=True))
            at = next(place for place, (a, b) in pairs if a != b)
            logits = self._behind(self.prompts[number], one[: at + 1])[at]
            short = float(logits.max() - logits[[one[at], other[at]]].min())
            if short > CLEAR:
                raise Failed(
                    f"prompt {number} ({len(self.prompts[number])} tokens), token {at}: {one[at]}, "
                    f"{whose} {other[at]}, {short:.2f} deviations below float32's best"
                )
            apart += 1
        if not apart:
            return f"identical to {whose}"
        said = f"{apart} of {len(found)} outputs leave {whose}, where float32 sees nearly a tie"
        return f"{said}; {self.right(found)}"


def on_cpu(directory: Path) -> Model:
    """What is compared with."""
    return Model(directory, CPUDevice(), torch.float32)
