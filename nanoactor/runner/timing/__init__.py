"""Clocks, deadlines and threads of steps."""
