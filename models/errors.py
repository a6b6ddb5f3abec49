"""Errors about models; messages about a file name the file, key or value."""

from __future__ import annotations


class ModelError(ValueError):
    """Base of the errors raised when a model cannot be loaded."""

    picklable = True  # raised in the user's process if it occurs in another process


class UnsupportedModel(ModelError):
    """The configuration requires something that is not implemented."""


class WeightsError(ModelError):
    """A weight file is missing, damaged, or does not match the configuration."""


class NotEnoughMemory(ModelError):
    """The KV cache would be too small to serve a single sequence."""


class RanksDisagree(RuntimeError):
    """The ranks of a tensor-parallel group have chosen different tokens (checked in debug mode)."""
