"""Turns waiting sequences into planned steps, and step results into tokens."""
