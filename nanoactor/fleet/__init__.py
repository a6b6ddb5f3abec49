"""Several engines (replicas) behind HTTP servers (ingresses): routing of requests, and recovery of
streams when an engine dies.

This package is independent of Ray. `nanoactor.ray_serve` runs it on Ray.
"""
