"""The Responses API: translated to chats and back."""
