"""Each file of `examples/` runs as a user would run it, and does what it says."""
