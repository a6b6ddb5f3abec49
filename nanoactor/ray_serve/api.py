"""All names used from Ray's API, in one place, because the API of request routers may change with
any release.

`tests/ray_serve/test_api.py` imports them. The version bounds of the extra are the tested releases.
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
