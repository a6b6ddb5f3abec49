"""Options of an engine, including their names in other engines."""
