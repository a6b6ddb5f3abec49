"""Grammars that constrain sequences, and the vocabulary masks that they produce."""
