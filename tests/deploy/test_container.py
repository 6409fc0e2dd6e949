"""Dockerfile, compose and Kubernetes files: checkers accept them, and what they start is a server that starts."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.tools import DEPLOY, ROOT, accepts, documents, needs
from tests.http.process import starter
from widebeam.config import Config
from widebeam.errors import ConfigError
from widebeam.settings import parse

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def instruction(name: str) -> Any:
    """The last JSON form of one, as `ENTRYPOINT ["a", "b"]`."""
    return json.loads(re.findall(rf"^{name} (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])


def image_environment() -> dict[str, str]:
    """What the last ENV sets, but for the path of programs."""
    text = DOCKERFILE.rpartition("\nENV ")[2].partition("\nUSER")[0].replace("\\\n", " ")
    return dict(pair.split("=", 1) for pair in text.split() if not pair.startswith("PATH="))


def pod() -> Any:
    (deployment,) = documents("kubernetes/deployment.yaml")
    return deployment["spec"]["template"]["spec"]  # type: ignore[index]


@needs("hadolint")
def test_hadolint_accepts_the_dockerfile() -> None:
    accepts("hadolint", DEPLOY / "Dockerfile")


@needs("kubernetes-validate")
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_manifests_are_of_their_schemas(path: Path) -> None:
    accepts("kubernetes-validate", "--strict", path)


@needs("check-jsonschema")
def test_the_compose_file_is_of_its_schema() -> None:
    accepts("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_the_image_gets_all_that_it_copies() -> None:
    """.dockerignore lets in what the Dockerfile names, and no more."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    copied = {
        source
        for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for source in sources.split()
    }
    assert lines[0] == "*" and {line[1:] for line in lines if line.startswith("!")} == copied
    assert all((ROOT / source).exists() for source in copied)


def test_the_image_starts_a_server_with_its_command_line(
    checkpoint: Path, catalog_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entry point and environment as they stand; the model in the place of /model. All that it writes is in /cache."""
    tini, dashes, program, *serve = instruction("ENTRYPOINT")
    assert (tini, dashes, program, instruction("CMD")) == ("tini", "--", "widebeam", ["/model"])
    cache, logs = tmp_path / "cache", tmp_path / "logs"
    cache.mkdir()
    logs.mkdir()
    for name, value in image_environment().items():
        monkeypatch.setenv(name, value.replace("/cache", str(cache)))
    with starter(checkpoint, catalog_file, logs) as begin:
        server = begin("--port", "0", serve=(sys.executable, "-m", program, *serve)).ready()
        answer = server.call("GET", "/ready")
        assert answer is not None and answer.status == 200
        assert "0.0.0.0" in server.log.read_text()  # it warns that it listens beyond loopback without a key
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(30) == 0


def parse_settings(folder: Path, text: str, environment: dict[str, str]) -> Config:
    """As `widebeam serve --config FILE` reads them."""
    (folder / "widebeam.toml").write_text(text)
    return parse(Config, ["--config", str(folder / "widebeam.toml")], "widebeam serve MODEL", environment)


def test_the_pods_settings_are_settings(tmp_path: Path) -> None:
    """The config map, read as the server reads it, agrees with the pod around it."""
    (container,) = pod()["containers"]
    (settings,) = documents("kubernetes/configmap.yaml")
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert container["args"] == ["--config", "/etc/widebeam/widebeam.toml"] and "/etc/widebeam" in mounts
    config = parse_settings(tmp_path, settings["data"]["widebeam.toml"], {})  # type: ignore[index]
    for path in (config.engine.model, config.engine.catalog, config.server.api_key_file):
        assert isinstance(path, str) and any(path == mount or path.startswith(mount + "/") for mount in mounts), path
    assert config.server.host == "0.0.0.0" and config.server.port == container["ports"][0]["containerPort"]
    asleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] > asleep + config.server.drain_timeout_s


def test_the_variables_of_a_service_stay_out_of_the_pod(tmp_path: Path) -> None:
    """A Service of the name `widebeam` would set the server's port to a URL."""
    with pytest.raises(ConfigError, match="WIDEBEAM_PORT"):
        parse_settings(tmp_path, '[engine]\nmodel = "m"\n', {"WIDEBEAM_PORT": "tcp://10.0.0.7:8000"})
    assert pod()["enableServiceLinks"] is False


def test_the_pod_may_do_no_more_than_it_needs() -> None:
    (container,) = pod()["containers"]
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/cache", "/tmp"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    user = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[-1]
    of_pod = pod()["securityContext"]
    assert (str(of_pod["runAsUser"]), str(of_pod["runAsGroup"])) == user and of_pod["runAsNonRoot"] is True


def test_probes_ask_what_needs_no_key() -> None:
    (container,) = pod()["containers"]
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")} == {"/ready"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"


def test_the_compose_file_suits_the_proxy_and_the_drain() -> None:
    """HAProxy's variables are those of its file, its servers those beside it, and nobody is killed while it drains."""
    (compose,) = documents("compose.yaml")
    services: Any = compose["services"]
    environment = services["haproxy"]["environment"]
    assert set(environment) <= set(re.findall(r"\$\{(\w+)-", (DEPLOY / "haproxy" / "haproxy.cfg").read_text()))
    servers = {value.partition(":")[0] for name, value in environment.items() if name.startswith("SERVER_")}
    assert servers == set(services) - {"haproxy"}
    for name in servers:
        flags = dict(flag.split("=") for flag in services[name]["command"][1:])
        assert float(services[name]["stop_grace_period"].rstrip("s")) > float(flags["--drain-timeout-s"])
