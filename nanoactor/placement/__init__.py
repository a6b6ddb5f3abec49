"""The placement of actors on processes, and the edges between actors."""
