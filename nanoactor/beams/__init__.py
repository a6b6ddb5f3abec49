"""Beam search on top of the engine's held requests."""
