"""A step on the host: its rows, laid out in arrays."""
