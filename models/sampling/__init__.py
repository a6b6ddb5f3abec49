"""From logits to a token: rules, masks, filters, random numbers."""
