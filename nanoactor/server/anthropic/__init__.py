"""The Messages API: translated to chats and back."""
