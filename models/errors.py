"""Errors about models. If a file is at fault, the message names the file, the key or the value."""

from __future__ import annotations


class ModelError(ValueError):
    """Base class of the errors raised if a model cannot be loaded."""

    picklable = True  # raised in the user's process if it occurs in another process


class UnsupportedModel(ModelError):
    """The configuration requires something that is not implemented."""


class WeightsError(ModelError):
    """A weight file is missing, damaged, or does not match the configuration."""


class NotEnoughMemory(ModelError):
    """The memory left for the KV cache is too small to serve a single sequence."""


class RanksDisagree(RuntimeError):
    """The ranks of a tensor-parallel group have chosen different tokens. Checked only in debug
    mode."""
