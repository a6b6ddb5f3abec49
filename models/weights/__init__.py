"""The weights of a checkpoint: reading them, their formats, and the forms in which devices use
them."""
