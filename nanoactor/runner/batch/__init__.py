"""The host's side of steps: rows and their parameters, laid out in arrays."""
