"""What decoders are made of: projections, norms, rotation, attention, feed-forward."""
