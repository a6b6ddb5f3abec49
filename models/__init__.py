"""Models in PyTorch: layers, weights, sampling and devices. This package does not depend on
actors."""
