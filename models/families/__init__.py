"""Families of decoders: a file each says what its layers are made of."""
