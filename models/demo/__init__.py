"""The demo model: a small Qwen3, its tokenizer, and the script that trains it."""
