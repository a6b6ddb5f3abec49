"""Converts text to token ids and back. Importing this package loads neither torch nor
transformers."""
