"""All names of Ray that are used, in one place: the request router's API may change with a release.

`tests/ray_serve/test_api.py` imports them; the extra's bounds are the releases that were tried.
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
