"""The number of replicas: the sum of what their loads require."""

from __future__ import annotations

import math
from typing import Any

_FULL = 0.8
"""Share of a replica that may be in use before another is needed."""


def by_demand(context: Any) -> tuple[int, dict[str, Any]]:
    """Return a number of replicas for Ray Serve, within the configured bounds."""
    reported = context.aggregated_metrics.get("demand", {})
    wanted = wanted_replicas(sum(reported.values()))
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(wanted, least), most), {}


def wanted_replicas(demand: float) -> int:
    """Return the number of replicas for this demand."""
    return max(1, math.ceil(demand / _FULL))
