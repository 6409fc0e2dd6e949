"""The real HAProxy with the file of deploy/haproxy, as a process of its own in front of the addresses given to it."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.http.service import Answer, ask, wait_until

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "haproxy" / "haproxy.cfg"
Address = tuple[str, int]


@dataclass
class Proxy:
    address: Address
    socket: Path
    headers: dict[str, str] = field(default_factory=dict)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        session: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        of_session = {} if session is None else {"x-session-id": session}
        return ask(self.address, method, path, body, self.headers | of_session | (headers or {}))

    def admin(self, command: str) -> str:
        """What operators do by the socket."""
        with closing(socket.socket(socket.AF_UNIX)) as line:
            line.connect(str(self.socket))
            line.sendall(command.encode() + b"\n")
            with line.makefile() as answer:
                return answer.read().strip()


def free_address() -> Address:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", probe.getsockname()[1]


def environment(folder: Path, listen: Address, servers: Sequence[Address]) -> dict[str, str]:
    """All that the file takes from outside."""
    named = {f"SERVER_{number}": f"{host}:{port}" for number, (host, port) in enumerate(servers, 1)}
    own = {"LISTEN": f"{listen[0]}:{listen[1]}", "ADMIN_SOCKET": str(folder / "admin.sock")}
    return os.environ | named | own | {"RUN_AS": pwd.getpwuid(os.getuid()).pw_name}


@contextmanager
def running_proxy(folder: Path, servers: Sequence[Address], headers: dict[str, str] | None = None) -> Iterator[Proxy]:
    """HAProxy until the end of the block, from when it listens."""
    listen = free_address()
    with (folder / "haproxy.log").open("w") as log:
        command = ["haproxy", "-db", "-f", str(CONFIG)]
        popen = subprocess.Popen(command, env=environment(folder, listen, servers), stdout=log, stderr=log)
        try:

            def listens() -> bool:
                assert popen.poll() is None, (folder / "haproxy.log").read_text()
                with closing(socket.socket()) as probe:
                    return probe.connect_ex(listen) == 0

            wait_until(listens)
            yield Proxy(listen, folder / "admin.sock", headers or {})
        finally:
            popen.terminate()
            assert popen.wait(30) is not None
