"""OpenAI's Responses API: requests are translated to chats, and answers back."""
