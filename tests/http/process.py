"""`widebeam serve` as a process of its own, for tests of signals, proxies and deployments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.http.service import Answer, ask

ROOT = Path(__file__).resolve().parents[2]
SERVE = (sys.executable, "-m", "widebeam", "serve")

LEVELS = 120
LONG: dict[str, Any] = {
    "input_ids": [5] * 20,
    "catalog": "none",
    "sampling_params": {"beam_width": 8, "n": 8, "max_new_tokens": LEVELS, "ignore_eos": True},
}


@dataclass
class Process:
    """A server, what it writes, and HTTP to it with a connection for each request."""

    popen: subprocess.Popen[str]
    log: Path
    address: tuple[str, int] = ("127.0.0.1", 0)
    headers: dict[str, str] = field(default_factory=dict)

    def ready(self) -> Process:
        """Wait until it says where it listens."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line.startswith("ready on http://"), self.log.read_text()
        self.address = ("127.0.0.1", int(line.rpartition(":")[2]))
        return self

    def call(self, method: str, path: str, body: Any = None) -> Answer | None:
        """None: there was nobody to connect to. Everything else that is not a whole answer raises."""
        try:
            return ask(self.address, method, path, body, self.headers)
        except ConnectionRefusedError:
            return None

    def post(self, path: str, body: Any) -> Answer | None:
        return self.call("POST", path, body)

    def stats(self) -> dict[str, Any]:
        answer = self.call("GET", "/server_info")
        assert answer is not None
        stats: dict[str, Any] = answer.json["internal_states"][0]
        return stats

    def in_flight(self) -> int:
        return int(self.stats()["requests_in_flight"])

    def works_on_long(self) -> bool:
        """LONG, or what is longer, has been accepted."""
        return int(self.stats()["row_levels_in_flight"]) >= 8 * (LEVELS - 1)


@contextmanager
def starter(checkpoint: Path, catalog_file: Path, folder: Path) -> Iterator[Callable[..., Process]]:
    """A function that starts a server with the flags given to it; what is left of them ends with the block."""
    with ExitStack() as stack:

        def begin(*flags: str, serve: tuple[str, ...] = SERVE) -> Process:
            log = folder / f"log-{len(list(folder.iterdir()))}"
            command = [*serve, str(checkpoint), "--catalog", str(catalog_file), "--device", "cpu"]
            popen = subprocess.Popen(
                [*command, *flags],
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("w")),
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},  # others spin on busy cores
            )
            stack.enter_context(popen)
            stack.callback(popen.kill)
            return Process(popen, log)

        yield begin
