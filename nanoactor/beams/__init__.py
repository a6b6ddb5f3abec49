"""Beam search on top of the engine."""
