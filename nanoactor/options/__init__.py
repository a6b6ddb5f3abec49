"""Options of an engine, and their names in other engines."""
