"""The demo vision model: a small Qwen3-VL that reads digits, and the script that trains it."""
