"""Anthropic's Messages API. Requests are converted to chat requests, and chat answers to
messages."""
