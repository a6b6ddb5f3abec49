"""Errors in a model's files; each message names the file, key or value."""

from __future__ import annotations


class ModelError(ValueError):
    """Base of the errors raised when a model cannot be loaded."""

    picklable = True  # raised in the user's process when it happens in another


class UnsupportedModel(ModelError):
    """The configuration asks for something that is not implemented."""


class WeightsError(ModelError):
    """A weight file is missing, damaged, or does not hold what the configuration says."""


class NotEnoughMemory(ModelError):
    """The key-value cache would be too small to serve one sequence."""


class RanksDisagree(RuntimeError):
    """Debug mode: the ranks of a tensor-parallel group have chosen different tokens."""
