"""Building blocks of decoders: projections, norms, rotary embeddings, attention and feed-forward
layers."""
