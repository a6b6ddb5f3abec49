"""Replicas of an engine on Ray Serve. Ray places, monitors and scales them. `nanoactor.fleet`
routes requests and recovers streams.

Requires the extra `nanoactor[ray]`. Only this package and `nanoactor.ray_data` import Ray.
"""
