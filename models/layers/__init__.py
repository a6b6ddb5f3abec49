"""Building blocks of decoders: projections, norms, rotary embedding, attention, feed-forward."""
