"""Pooling: requests for embedding vectors of texts, and for scores of pairs of texts."""
