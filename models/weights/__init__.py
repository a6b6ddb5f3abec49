"""Weights of a checkpoint: reading, formats, and the forms in which devices use them."""
