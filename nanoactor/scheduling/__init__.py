"""The scheduler's logic, which decides what runs in each step. It does no I/O: it receives events
and returns messages."""
