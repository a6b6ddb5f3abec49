"""Parts of vision models other than the decoder: patches, positions and the tower."""
