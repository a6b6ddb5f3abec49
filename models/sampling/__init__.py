"""Sampling of tokens from logits: rules, masks, truncation, and random numbers."""
