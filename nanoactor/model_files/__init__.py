"""The files of a model: finding or downloading them, reading their settings, and detecting
changes."""
