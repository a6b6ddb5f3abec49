"""Layers, models, weights, sampling and devices in torch; knows nothing of actors."""
