"""Processing of a user's request, up to the message that admits it."""
