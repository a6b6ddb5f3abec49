"""Sequences of requests: their tokens, counters, end reasons and grammar states."""
