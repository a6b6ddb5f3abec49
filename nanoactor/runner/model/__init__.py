"""The model and its state on the device: weights, encoder, batch and KV cache."""
