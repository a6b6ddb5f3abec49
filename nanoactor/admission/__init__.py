"""From a user's request to the message that admits it."""
