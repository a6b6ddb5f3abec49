"""The KV cache's bookkeeping: contents of blocks, their users, and which can be reused."""
