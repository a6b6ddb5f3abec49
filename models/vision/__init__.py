"""The parts of vision models other than the decoder: configuration, patches, positions, and the
vision tower."""
