"""Clocks, deadlines and thread counts for steps."""
