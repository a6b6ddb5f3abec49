"""The placement of actors in processes, and the edges (message channels) between actors."""
