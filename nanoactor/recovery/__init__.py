"""Recovery of requests after a process has died."""
