"""Clocks, time limits and thread counts for steps."""
