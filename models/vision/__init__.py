"""What models that see have beside their decoder: patches, positions, the tower."""
