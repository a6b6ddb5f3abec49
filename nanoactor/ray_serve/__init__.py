"""Replicas on Ray Serve. Ray places, watches and scales them; `nanoactor.fleet` does the rest.

Needs the extra `nanoactor[ray]`; nothing outside this folder imports Ray, but for
`nanoactor.ray_data`.
"""
