"""Anthropic's Messages API: requests are translated to chats, and answers back."""
