"""Sequences, and what the scheduler knows of them."""
