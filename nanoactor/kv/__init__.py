"""Bookkeeping of the KV cache: block contents, their holders, and which blocks can be reused."""
