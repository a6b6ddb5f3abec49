"""What a check is, what it may use, and how results are compared."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import torch

from nanoactor.models.devices.npu.device import NPUDevice

_CODES = (
    re.compile(r"error code(?: is|:)?\s*(\d{6})", re.IGNORECASE),
    re.compile(r"\b([1235]\d{5})\b"),
    re.compile(r"\b(E[A-Z]\d{4}|ERR\d{5})\b"),
)


class Failed(Exception):
    """A result is wrong. Raised from another exception, the process is spoiled as well."""


class Skipped(Exception):
    """The check says nothing here."""


@dataclasses.dataclass(frozen=True)
class Rig:
    """The device under test, and how thorough to be."""

    device: NPUDevice
    name: str
    """npu, or npu:N."""
    devices: int
    """How many may be used."""
    quick: bool
    emulated: bool
    scratch: Path
    """A directory that all checks of a run share."""
    graph_mode: str

    @property
    def where(self) -> torch.device:
        """Where tensors go."""
        return self.device.torch_device

    @property
    def dtype(self) -> torch.dtype:
        """What models run in."""
        best, runtime = torch.bfloat16, self.device.runtime
        return best if runtime.supports(best) else runtime.default_dtype

    @property
    def dtypes(self) -> list[torch.dtype]:
        """What operators are tried in."""
        every = [torch.bfloat16, torch.float16]
        return [self.dtype] if self.quick else every

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device: operators may work in place."""
        return tensor.to(self.where, copy=True)

    def need(self, dtype: torch.dtype) -> None:
        """Skip what the chip does not have."""
        if not self.device.runtime.supports(dtype):
            raise Skipped(f"{self.device.runtime.chip} has no {short(dtype)}")


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    function: Callable[[Rig], str]
    """Returns what is worth telling. Raises `Failed`, `Skipped`, or whatever goes wrong."""
    alone: bool = False
    """Whether it may hang or spoil a process, and gets a fresh one."""
    seconds: int = 180
    figure: bool = False
    """Whether it measures instead of judging."""
    skip: str = ""
    """Why it would say nothing here, where that is known beforehand."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model's layers."""

    heads: int
    kv_heads: int
    hidden: int
    intermediate: int
    size: int = 128
    """Of a head."""

    @property
    def scale(self) -> float:
        """Of attention's scores."""
        return float(self.size**-0.5)


MODELS = {"0.6B": Shape(16, 8, 1024, 3072), "8B": Shape(32, 8, 4096, 12288)}
"""Qwen3's."""
BLOCK = 128
ROUNDINGS = 4
"""How many roundings of its type a result may be off, as a share of the largest value."""


def shapes(rig: Rig) -> dict[str, Shape]:
    """Those that are tried."""
    return dict(list(MODELS.items())[: 1 if rig.quick else None])


def short(dtype: torch.dtype) -> str:
    """Its name."""
    return str(dtype).removeprefix("torch.")


def noise(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers on the host, the same wherever it runs."""
    generator = torch.Generator().manual_seed(seed * 7919 + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def off(what: str, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """By how many roundings of the type; raises `Failed` for too many."""
    if found.shape != expected.shape:
        raise Failed(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    found, expected = found.detach().cpu().double(), expected.double()
    if not bool(found.isfinite().all()):
        raise Failed(f"{what}: {int((~found.isfinite()).sum())} of {found.numel()} are not finite")
    rounding = torch.finfo(dtype).eps / 2
    error = float((found - expected).abs().max() / expected.abs().max()) / rounding
    if error > ROUNDINGS:
        raise Failed(f"{what}: off by {error:.1f} roundings of {short(dtype)}, not {ROUNDINGS}")
    return error


def same(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit; raises `Failed`."""
    found = found.detach().cpu()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Failed(
            f"{what}: {short(found.dtype)} {tuple(found.shape)}, "
            f"not {short(expected.dtype)} {tuple(expected.shape)}"
        )
    wrong = int((found != expected).sum())
    if wrong:
        raise Failed(f"{what}: {wrong} of {found.numel()} numbers differ")


def told(errors: dict[str, float]) -> str:
    """The worst of each shape."""
    return "off by " + ", ".join(f"{error:.2f} ({name})" for name, error in errors.items())


def code_of(said: str) -> str:
    """What an error of Ascend's is looked up by, such as 561002 or EZ9999; empty for others."""
    after, bare, lettered = (pattern.search(said) for pattern in _CODES)
    return ", ".join(match.group(1) for match in (after or bare, lettered) if match)


def told_of(error: BaseException) -> str:
    """An exception's kind, its first line and its code."""
    text = str(error).strip()
    first = text.splitlines()[0].strip() if text else "it says nothing"
    code = code_of(text) if isinstance(error, RuntimeError) else ""
    said = f"{type(error).__name__}: {first}"
    return f"{said} [{code}]" if code and code not in first else said
