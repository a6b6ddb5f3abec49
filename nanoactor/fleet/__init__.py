"""Several engines behind an ingress: routing, and streams that move when an engine dies.

This package is independent of Ray; `nanoactor.ray_serve` runs it on Ray.
"""
