"""Grammars that constrain sequences, and the token masks computed from them."""
