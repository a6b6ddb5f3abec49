"""All public names that this package imports from Ray, in one place, because the API of request
routers may change with any release.

`tests/ray_serve/test_api.py` checks these imports. The version bounds of the extra `nanoactor[ray]`
are the tested releases.
"""

from __future__ import annotations

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

__all__ = [
    "AutoscalingConfig",
    "AutoscalingPolicy",
    "PendingRequest",
    "RequestRouter",
    "RequestRouterConfig",
    "RunningReplica",
    "ray",
    "serve",
]
