"""Several engines behind one ingress: routing, and streams that move when an engine dies.

Knows nothing of Ray: `nanoactor.ray_serve` connects it.
"""
