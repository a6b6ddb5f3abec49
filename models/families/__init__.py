"""Families of decoders: one file each describes its layers."""
