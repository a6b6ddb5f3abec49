"""Parts of vision models besides the decoder: patches, positions, the tower."""
