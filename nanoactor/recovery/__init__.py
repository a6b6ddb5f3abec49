"""What happens to requests when a process dies."""
