"""Actors, the channels between them, and the processes that run them; independent of LLMs."""
