"""Models in PyTorch: layers, weights, sampling and devices. It does not depend on actors."""
