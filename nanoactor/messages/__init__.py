"""Messages between actors, and their parts."""
