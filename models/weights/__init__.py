"""Tensors of a checkpoint, read by name."""
