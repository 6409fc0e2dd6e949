"""What a Ray Serve deployment is told, and when it grows. Imports neither Ray nor torch."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from widebeam.config import Config, EngineConfig, Positive, ServerConfig, convert
from widebeam.errors import ConfigError

ROWS = "widebeam_rows_in_flight"
"""The number by which deployments are scaled, as replicas report it."""
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
RING_PLACES = 500
"""Of each replica on the ring of sessions. How many of them a replica gets differs by about 1 / sqrt(RING_PLACES) of
the mean from one to the next: 4 %, with Ray's own 100 it is 10."""
_PROXY_LISTENS = "Ray's proxy listens, say it in the http_options of the Serve config"
_OF_RAY = {
    "host": _PROXY_LISTENS,
    "port": _PROXY_LISTENS,
    "drain_delay_s": "Ray stops a replica when it sends it nothing any more",
}
"""Settings of the server that have no place here, and why."""
_LAST_STEPS_S = 10.0  # of a replica's end, behind the requests: to stop the engine and close connections


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas there are, and what each may take."""

    num_gpus: Annotated[float, Meta(ge=0)] = 1.0
    """GPUs of each replica. 0: it runs on the CPU."""
    num_cpus: Annotated[float, Meta(ge=0)] = 1.0
    """CPUs that Ray sets aside for each replica."""
    replicas: Positive = 1
    """Replicas, or the fewest if there may be more."""
    max_replicas: Positive | None = None
    """Most replicas. With it Ray adds and removes some by the beam rows in flight."""
    target_rows: Positive | None = None
    """Beam rows, waiting or running, that each replica should have; by default one full wave, max_wave_rows."""
    affinity: bool = True
    """Whether requests of one `x-session-id` go to one replica, by Ray's consistent hash (alpha). Without it, and in
    Ray's HAProxy mode, which refuses it, a request goes to any."""
    max_queued_requests: Positive = 128
    """Requests that wait in one proxy for a replica to take them; one more is refused with 429."""
    retry_after_s: Annotated[float, Meta(gt=0)] = 1.0
    """What the proxy tells them to wait."""
    max_surge_percent: Annotated[int, Meta(ge=0, le=100)] = 0
    """Replicas, in percent, that an update may start before it stops others: they need GPUs beside those in use. With 0
    capacity is missing while an update runs; a single replica is missing altogether, and requests wait."""
    health_check_period_s: Annotated[float, Meta(gt=0)] = 5.0
    """Time between two looks at a replica; one that fails three of them is replaced."""


class RayConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of `widebeam serve`, and those of the deployment."""

    replica: ReplicaConfig = ReplicaConfig()


def read_config(args: dict[str, Any]) -> RayConfig:
    """The settings from the `args` of an application. Raises ConfigError."""
    server = args.get("server")
    for name, reason in _OF_RAY.items():
        if isinstance(server, dict) and name in server:
            raise ConfigError(f"server.{name}: {reason}")
    config: RayConfig = convert(args, RayConfig)
    replica = config.replica
    if replica.max_replicas is not None and replica.max_replicas < replica.replicas:
        raise ConfigError(f"replica.max_replicas {replica.max_replicas} is less than replicas {replica.replicas}")
    if replica.target_rows is not None and replica.max_replicas is None:
        raise ConfigError("replica.target_rows has no effect without replica.max_replicas")
    return config


def engine_config(config: RayConfig) -> EngineConfig:
    """The engine's settings: a replica without GPUs takes none."""
    if config.replica.num_gpus or config.engine.device != "auto":
        return config.engine
    return msgspec.structs.replace(config.engine, device="cpu")


def server_config(config: RayConfig) -> ServerConfig:
    """The server's settings: it listens on a free port of loopback, for its replica alone."""
    return msgspec.structs.replace(config.server, host="127.0.0.1", port=0)


def deployment_options(config: RayConfig) -> dict[str, Any]:
    """The options of the deployment, in the words of Ray Serve."""
    replica, engine = config.replica, config.engine
    options: dict[str, Any] = {
        "ray_actor_options": {"num_gpus": replica.num_gpus, "num_cpus": replica.num_cpus},
        # what one replica may have in flight is for its engine to say, which counts rows and tokens too
        "max_ongoing_requests": engine.max_waiting_requests,
        "max_queued_requests": replica.max_queued_requests,
        "backpressure_config": {"status_code": 429, "retry_after_s": replica.retry_after_s},
        "graceful_shutdown_timeout_s": config.server.drain_timeout_s + _LAST_STEPS_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": replica.health_check_period_s,
        "max_constructor_retry_count": 3,  # a model that does not load now will hardly do so at the twentieth try
        "max_surge_percent": replica.max_surge_percent,
    }
    if replica.affinity:
        options["request_router_config"] = {
            "request_router_class": ROUTER,
            "request_router_kwargs": {"num_virtual_nodes": RING_PLACES},
        }
    if replica.max_replicas is None:
        return options | {"num_replicas": replica.replicas}
    return options | {
        "autoscaling_config": {
            "min_replicas": replica.replicas,
            "max_replicas": replica.max_replicas,
            "policy": {
                "policy_function": f"{__name__}:RowsPolicy",
                "policy_kwargs": {"target_rows": replica.target_rows or engine.max_wave_rows},
            },
        }
    }


class RowsPolicy:
    """As many replicas as the beam rows in flight need: Ray asks this, and keeps to its own bounds and delays."""

    def __init__(self, target_rows: int) -> None:
        self._target_rows = target_rows

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: Ray's AutoscalingContext. Returns the replicas wanted, and what to keep until the next call."""
        by_replica = (context.aggregated_metrics or {}).get(ROWS, {})
        if not by_replica:
            return context.target_num_replicas, {}  # nothing was reported yet
        return max(1, math.ceil(sum(by_replica.values()) / self._target_rows)), {}
