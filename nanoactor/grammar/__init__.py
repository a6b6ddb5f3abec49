"""Grammars that constrain a model's output, and the token masks (which tokens may come next)
computed from them."""
