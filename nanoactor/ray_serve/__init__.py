"""Replicas on Ray Serve. Ray places, monitors and scales them; `nanoactor.fleet` does the rest.

Requires the extra `nanoactor[ray]`. Only this package and `nanoactor.ray_data` import Ray.
"""
