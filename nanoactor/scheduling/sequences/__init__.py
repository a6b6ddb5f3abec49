"""Sequences, and the scheduler's state of each."""
