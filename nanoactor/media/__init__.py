"""Pictures and videos in prompts, and how the work of encoding them is divided."""
