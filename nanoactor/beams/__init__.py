"""Beam search on top of the engine's held requests, whose sequences pause after each token."""
