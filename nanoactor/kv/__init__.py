"""The block manager: which KV cache blocks hold which content, which sequences use them, and which
can be reused."""
