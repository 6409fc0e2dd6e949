"""From the `args` of a Serve config to what engine, server and Ray are told. Needs no Ray."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml

from widebeam.deploy.ray_config import (
    ROWS,
    RowsPolicy,
    deployment_options,
    engine_config,
    read_config,
    server_config,
)
from widebeam.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = {"engine": {"model": "m"}}


def test_engine_and_server_get_what_is_said_and_defaults_else() -> None:
    config = read_config({"engine": {"model": "m", "max_wave_rows": 64}, "server": {"drain_timeout_s": 5}})
    assert engine_config(config).max_wave_rows == 64 and engine_config(config).device == "auto"
    served = server_config(config)
    assert (served.drain_timeout_s, served.host, served.port) == (5, "127.0.0.1", 0)
    assert pickle.loads(pickle.dumps(config)) == config  # as Ray sends it to a replica


@pytest.mark.parametrize("name", ["serve.yaml", "rayservice.yaml"])
def test_the_examples_leave_catalogs_to_the_publisher(name: str) -> None:
    """As docs/ray.md changes them: a version that replicas have watched coming cannot be published any more."""
    tree, *_ = yaml.safe_load_all((ROOT / "deploy" / "ray" / name).read_text())
    config = yaml.safe_load(tree["spec"]["serveConfigV2"]) if "spec" in tree else tree
    (application,) = config["applications"]
    engine = engine_config(read_config(application["args"]))
    assert engine.catalog and not engine.watch_catalogs


@pytest.mark.parametrize(("num_gpus", "said", "device"), [(0, "auto", "cpu"), (1, "auto", "auto"), (0, "cuda", "cuda")])
def test_a_replica_without_a_gpu_takes_none(num_gpus: int, said: str, device: str) -> None:
    config = read_config({"engine": {"model": "m", "device": said}, "replica": {"num_gpus": num_gpus}})
    assert engine_config(config).device == device


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "engine"),
        ({"engine": {"model": "m", "max_wave_row": 1}}, "max_wave_row"),
        (MODEL | {"replica": {"replicas": 0}}, "replica.replicas"),
        (MODEL | {"server": {"port": 80}}, "server.port"),
        (MODEL | {"server": {"host": "::"}}, "server.host"),
        (MODEL | {"server": {"drain_delay_s": 1}}, "server.drain_delay_s"),
        (MODEL | {"replica": {"replicas": 3, "max_replicas": 2}}, "max_replicas 2"),
        (MODEL | {"replica": {"target_rows": 5}}, "target_rows"),
    ],
)
def test_a_bad_setting_is_named(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(args)


def test_ray_is_told_limits_of_the_engine_and_gives_a_replica_time_to_drain() -> None:
    options = deployment_options(
        read_config(
            {
                "engine": {"model": "m", "max_waiting_requests": 77},
                "server": {"drain_timeout_s": 40},
                "replica": {"num_gpus": 0.5, "replicas": 3, "max_queued_requests": 9, "retry_after_s": 2},
            }
        )
    )
    assert options["max_ongoing_requests"] == 77 and options["num_replicas"] == 3
    assert options["max_queued_requests"] == 9
    assert options["backpressure_config"] == {"status_code": 429, "retry_after_s": 2}
    assert options["graceful_shutdown_timeout_s"] > 40
    assert options["ray_actor_options"]["num_gpus"] == 0.5
    router = options["request_router_config"]
    assert "ConsistentHashRouter" in router["request_router_class"]
    assert router["request_router_kwargs"] == {"num_virtual_nodes": 500}


def test_scaling_and_affinity_are_left_out_or_in() -> None:
    config = read_config(MODEL | {"replica": {"replicas": 2, "max_replicas": 4, "affinity": False}})
    options = deployment_options(config)
    assert "num_replicas" not in options and "request_router_config" not in options
    scaling = options["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 4)
    assert scaling["policy"]["policy_kwargs"] == {"target_rows": config.engine.max_wave_rows}


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [({}, 2), ({"a": 0.0, "b": 0.0}, 1), ({"a": 100.0}, 1), ({"a": 101.0}, 2), ({"a": 250.0, "b": 100.0}, 4)],
)
def test_replicas_are_as_many_as_their_rows_need(rows: dict[str, float], wanted: int) -> None:
    context = SimpleNamespace(aggregated_metrics={ROWS: rows} if rows else None, target_num_replicas=2)
    assert RowsPolicy(target_rows=100)(context) == (wanted, {})


def test_the_args_of_both_examples_are_settings() -> None:
    plain = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
    parts = list(yaml.safe_load_all((ROOT / "deploy/ray/rayservice.yaml").read_text()))
    service = next(part for part in parts if part["kind"] == "RayService")
    on_kubernetes = yaml.safe_load(service["spec"]["serveConfigV2"])
    for file in (plain, on_kubernetes):
        for application in file["applications"]:
            assert application["import_path"] == "widebeam.deploy.ray_serve:app"
            assert msgspec.to_builtins(read_config(application["args"]))["engine"]["model"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_extra_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import widebeam.deploy.ray_serve"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "-e '.[ray]'" in done.stderr.splitlines()[-1]
