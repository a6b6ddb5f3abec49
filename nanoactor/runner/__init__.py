"""The runner: the only part of the engine that imports torch."""
