"""Images and videos in prompts, and the division of their encoding into units of work."""
