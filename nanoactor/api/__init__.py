"""The public classes of the engine."""
