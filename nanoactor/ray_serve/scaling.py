"""Autoscaling policy for Ray Serve: scale to the number of replicas that the total load needs."""

from __future__ import annotations

import math
from typing import Any

_TARGET_UTILIZATION = 0.8
"""Utilization of the replicas, from 0 to 1, that the policy aims at."""


def by_demand(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the target number of replicas, within the configured bounds, and an empty policy
    state. Ray Serve calls this function with its autoscaling context."""
    reported = context.aggregated_metrics.get("demand", {})
    replicas = wanted_replicas(sum(reported.values()))
    min_replicas, max_replicas = (
        context.capacity_adjusted_min_replicas,
        context.capacity_adjusted_max_replicas,
    )
    return min(max(replicas, min_replicas), max_replicas), {}


def wanted_replicas(demand: float) -> int:
    """Return the number of replicas to run, at least 1, to meet a total demand (in fully used
    replicas) at the target utilization."""
    return max(1, math.ceil(demand / _TARGET_UTILIZATION))
