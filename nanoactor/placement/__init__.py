"""Actors, their processes, and the edges between them."""
