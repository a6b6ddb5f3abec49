"""The configuration that the actors of an engine receive."""
