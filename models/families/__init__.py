"""Families of decoders; one file per family describes its layers."""
