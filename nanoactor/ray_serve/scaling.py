"""Autoscaling policy: the number of replicas that the sum of their loads requires."""

from __future__ import annotations

import math
from typing import Any

_TARGET_UTILIZATION = 0.8
"""Utilization of a replica, as a fraction, above which another replica is needed."""


def by_demand(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the target number of replicas for Ray Serve, within the configured bounds."""
    reported = context.aggregated_metrics.get("demand", {})
    replicas = wanted_replicas(sum(reported.values()))
    min_replicas, max_replicas = (
        context.capacity_adjusted_min_replicas,
        context.capacity_adjusted_max_replicas,
    )
    return min(max(replicas, min_replicas), max_replicas), {}


def wanted_replicas(demand: float) -> int:
    """Return the number of replicas for this total demand, at least 1."""
    return max(1, math.ceil(demand / _TARGET_UTILIZATION))
