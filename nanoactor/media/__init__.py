"""Pictures and videos in prompts, and how their work is divided."""
