"""Pooling: embedding vectors of texts, and scores of pairs of texts."""
