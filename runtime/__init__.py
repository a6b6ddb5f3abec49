"""Actors, the channels between them and the processes they live in; knows nothing of LLMs."""
