"""Several engines behind one ingress: routing, and streams that move when an engine dies.

Independent of Ray: `nanoactor.ray_serve` connects it.
"""
