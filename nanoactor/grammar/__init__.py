"""Grammars that an answer must follow, and the masks that they leave of a vocabulary."""
