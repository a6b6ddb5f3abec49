"""The KV cache's bookkeeping: which block holds what, who uses it, what may be reused."""
