"""The application for Ray Serve, started from Python, `serve run`, `serve deploy` or KubeRay:

    serve run nanoactor.ray_serve.application:app model=demo replicas=2

Ray Serve reads the annotations of this module, which must not be strings. Therefore, the module has
no `from __future__ import annotations`.
"""

import dataclasses
import secrets
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from nanoactor.errors import InvalidConfig
from nanoactor.options.config import EngineConfig
from nanoactor.options.engine_options import engine_config
from nanoactor.ray_serve.api import (
    AutoscalingConfig,
    AutoscalingPolicy,
    RequestRouterConfig,
    ray,
    serve,
)
from nanoactor.ray_serve.deployments import Engine, Ingress
from nanoactor.ray_serve.options import FleetConfig
from nanoactor.server.config import ServerConfig

_SALT_BYTES = 32
_EXIT_SECONDS = 15.0
"""Time after the drain timeout within which processes must exit, in seconds."""
# Our code never blocks an event loop. The separate loops and threads that Ray Serve uses by default
# would take a third more CPU time.
_SINGLE_LOOP_VARIABLES = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
_QUIET_LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
_UNLIMITED_CALLS = 1_000_000
"""Maximum number of concurrent calls to a replica, too high ever to be reached. Each connection of
an ingress is a long-lived call, and the engine's own queue limits requests."""
_ROUTER_PATH = "nanoactor.ray_serve.router:ReplicaNameRouter"
_POLICY_PATH = "nanoactor.ray_serve.scaling:by_demand"


class Arguments(BaseModel):
    """Arguments of `serve run`, or of a configuration file. Unknown arguments are rejected."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """The model, as on the command line of `nanoactor serve`."""
    replicas: int = 1
    ingresses: int | None = None
    max_replicas: int | None = None
    engine: dict[str, Any] = Field(default_factory=dict)
    """Options of the engines: fields of `EngineConfig`, by name."""
    server: dict[str, Any] = Field(default_factory=dict)
    """Options of the HTTP servers: fields of `ServerConfig`, by name."""
    fleet: dict[str, Any] = Field(default_factory=dict)
    """Further options of the fleet: fields of `FleetConfig`, by name."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of all replicas and ingresses."""


def app(arguments: Arguments) -> Any:
    """Create the Ray Serve application from arguments that Ray Serve has validated. Raises
    `InvalidConfig` for an invalid option."""
    engine = engine_config(arguments.model, arguments.engine)
    server = _build_options(ServerConfig, arguments.server)
    fleet_options = {**arguments.fleet, "replicas": arguments.replicas}
    fleet_options |= {"ingresses": arguments.ingresses, "max_replicas": arguments.max_replicas}
    return build(engine, server, _build_options(FleetConfig, fleet_options), arguments.environment)


def _build_options(options_class: Any, options: dict[str, Any]) -> Any:
    names = [field.name for field in dataclasses.fields(options_class)]
    for name in options:
        if name not in names:
            raise InvalidConfig(
                f"{name!r:.100} is not an option; the options are {', '.join(names)}"
            )
    lists = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    return options_class(**{**options, **lists})


def build(
    config: EngineConfig,
    server: ServerConfig,
    fleet: FleetConfig,
    environment: dict[str, str] | None = None,
) -> Any:
    """Create the Ray Serve application: the replicas, and the ingresses (HTTP servers) in front of
    them. `environment` contains environment variables for the processes of both."""
    if config.prefix_salt is None:
        config = dataclasses.replace(config, prefix_salt=secrets.token_bytes(_SALT_BYTES))
    variables = {"env_vars": {**_SINGLE_LOOP_VARIABLES, **(environment or {})}}
    drain_seconds = server.drain_timeout + _EXIT_SECONDS
    common = {
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": max(5.0, fleet.silence_timeout),
        "logging_config": _QUIET_LOGGING,
    }
    engines = serve.deployment(Engine).options(
        name="engines",
        ray_actor_options={**resources(config, fleet), "runtime_env": variables},
        max_ongoing_requests=_UNLIMITED_CALLS,
        graceful_shutdown_timeout_s=drain_seconds + _EXIT_SECONDS,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER_PATH),
        **_scaling_options(fleet),
        **common,
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=fleet.ingresses or count_nodes(),
        ray_actor_options={"num_cpus": 0, "runtime_env": variables},
        max_replicas_per_node=1,
        graceful_shutdown_timeout_s=drain_seconds,
        **common,
    )
    return ingress.bind(engines.bind(config, fleet), config, server, fleet)


def _scaling_options(fleet: FleetConfig) -> dict[str, Any]:
    if fleet.max_replicas is None or fleet.max_replicas == fleet.replicas:
        return {"num_replicas": fleet.replicas}
    scaling = AutoscalingConfig(
        min_replicas=fleet.replicas,
        initial_replicas=fleet.replicas,
        max_replicas=fleet.max_replicas,
        metrics_interval_s=1.0,
        look_back_period_s=5.0,
        upscale_delay_s=5.0,
        downscale_delay_s=60.0,
        policy=AutoscalingPolicy(policy_function=_POLICY_PATH),
    )
    return {"autoscaling_config": scaling}


def count_nodes() -> int:
    """Return the number of live Ray nodes, or 1 if Ray is not initialized."""
    if not ray.is_initialized():
        return 1
    return max(1, sum(1 for node in ray.nodes() if node["Alive"]))


def resources(config: EngineConfig, fleet: FleetConfig) -> dict[str, Any]:
    """Return the resources that a replica's Ray actor requests. Tensor-parallel ranks are child
    processes of that actor, so all of their devices are on one node."""
    options: dict[str, Any] = {"num_cpus": fleet.cpus_per_replica}
    resource = accelerator(config.device)
    if resource == "GPU":
        options["num_gpus"] = config.tensor_parallel_size
    elif resource == "NPU":
        options["resources"] = {"NPU": config.tensor_parallel_size}
    return options


def accelerator(device: str) -> str:
    """Return the name of the Ray resource for a device: "GPU", "NPU", or an empty string for the
    CPU. For "auto", return the accelerator that the cluster has, if any."""
    if device != "auto":
        return {"cuda": "GPU", "npu": "NPU"}.get(device.partition(":")[0], "")
    available = ray.cluster_resources() if ray.is_initialized() else {}
    return next((resource for resource in ("GPU", "NPU") if available.get(resource, 0) > 0), "")
