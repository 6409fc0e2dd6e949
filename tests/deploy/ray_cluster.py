"""A Ray cluster of this machine alone, started and configured by the commands of docs/ray.md."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.http.service import Answer, ask

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent.parent


def application(name: str, prefix: str, engine: dict[str, Any], **replica: Any) -> dict[str, Any]:
    """One model in a Serve config, on the CPU."""
    args = {"engine": {"default_beam_width": 16} | engine, "replica": {"num_gpus": 0, "num_cpus": 0.1} | replica}
    return {"name": name, "route_prefix": prefix, "import_path": "widebeam.deploy.ray_serve:app", "args": args}


@dataclass
class Cluster:
    folder: Path
    head: subprocess.Popen[bytes]
    address: str
    environment: dict[str, str]
    port: int

    def apply(self, *applications: dict[str, Any]) -> None:
        """What `serve run --non-blocking` does with a config of these; returns when it is handed in."""
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "logging_config": {"enable_access_log": False},
            "applications": list(applications),
        }
        file = self.folder / "serve.json"  # JSON is YAML
        file.write_text(json.dumps(config))
        command = [str(BIN / "serve"), "run", "--non-blocking", "--address", self.address, str(file)]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """One request on a connection of its own, through Ray's proxy. A body that is not bytes is sent as JSON."""
        return ask(("127.0.0.1", self.port), method, path, body, headers)

    def replica_of(self, session: str | None = None, prefix: str = "") -> float | None:
        """What tells a replica from the others: when it started. None while there is none."""
        headers = {"x-session-id": session} if session else {}
        try:
            answer = self.call("GET", f"{prefix}/server_info", headers=headers)
        except OSError:
            return None
        return answer.json["started_at"] if answer.status == 200 else None

    def replicas(self, prefix: str = "", tries: int = 30) -> set[float]:
        """All that many sessions meet."""
        found = {self.replica_of(f"any-{number}", prefix) for number in range(tries)}
        return {started for started in found if started is not None}

    def processes(self, name: str) -> list[int]:
        """Process ids of an application's replicas, in this cluster alone."""
        ours = f"RAY_AUTH_TOKEN_PATH={self.environment['RAY_AUTH_TOKEN_PATH']}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                title = (folder / "cmdline").read_bytes()
                if (
                    title.startswith(f"ray::ServeReplica:{name}:".encode())
                    and ours in (folder / "environ").read_bytes()
                ):
                    found.append(int(folder.name))
        return found


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """With token authentication, without a dashboard, on loopback. Ends all that it started."""
    folder = Path(tempfile.mkdtemp(prefix="wbray", dir="/tmp"))  # short: paths of sockets have a limit
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_DEFAULT_HTTP_HOST": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    }
    port = free_port()
    command = [
        str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(port),
        "--include-dashboard", "false", "--num-cpus", "2", "--num-gpus", "0", "--temp-dir", str(folder / "ray"),
        "--object-store-memory", str(100 << 20),
    ]  # fmt: skip
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        cluster = Cluster(folder, head, f"127.0.0.1:{port}", environment, free_port())
        wait_for(lambda: "Ray runtime started" in (folder / "head.log").read_text(), 60)
        yield cluster
    finally:
        head.terminate()
        head.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so within {seconds} s"
        time.sleep(0.1)


@dataclass
class Load:
    """Threads that send one request after another, each for its own session, until told to stop."""

    cluster: Cluster
    path: str
    body: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)
    broken: list[Exception] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def _send(self, session: str) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(self.cluster.call("POST", self.path, self.body, {"x-session-id": session}))
            except (OSError, http.client.HTTPException) as error:
                self.broken.append(error)

    @contextmanager
    def running(self, threads: int) -> Iterator[Load]:
        senders = [threading.Thread(target=self._send, args=(f"user-{number}",)) for number in range(threads)]
        for sender in senders:
            sender.start()
        try:
            yield self
        finally:
            self._stop.set()
            for sender in senders:
                sender.join()
