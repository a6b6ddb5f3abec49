"""Messages between the engine's actors, and the structures that they contain."""
