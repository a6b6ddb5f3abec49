"""Compatibility with other engines: their names, command-line flags and Python modules."""
