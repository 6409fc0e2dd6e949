"""A real engine behind a real server on loopback, and a plain HTTP client that shares no code with ours."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from widebeam.blocking import LoopThread
from widebeam.config import ServerConfig, convert
from widebeam.engine.engine import Engine
from widebeam.http.server import Server

MODEL_NAME = "tiny-recommender"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


def ask(
    address: tuple[str, int], method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Answer:
    """One request on a connection of its own. A body that is not bytes is sent as JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        lower = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, lower, response.read())
    finally:
        connection.close()


def code(answer: Answer) -> tuple[int, str]:
    """Status and code of a refusal."""
    return answer.status, answer.json["error"]["code"]


@dataclass
class Service:
    """Engine and server live on the loop of `thread`."""

    engine: Engine
    server: Server
    thread: LoopThread

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        return ask(self.address, method, path, body, headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        return self.call("POST", path, body, headers)

    def get(self, path: str) -> Answer:
        return self.call("GET", path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The device is busy within the block: accepted requests wait."""
        begun, release = threading.Event(), threading.Event()

        def occupy(_: object) -> None:
            begun.set()
            release.wait(60)

        self.engine._worker.call(occupy)
        assert begun.wait(10)
        try:
            yield
        finally:
            release.set()

    def check(self) -> None:
        """Nothing runs and nothing leaks."""
        self.thread.run(self.engine.check_integrity())
        stats = self.engine.stats()
        assert (stats.requests_in_flight, stats.rows_in_flight) == (0, 0)
        assert (stats.row_levels_in_flight, stats.tokens_in_flight) == (0, 0)
        assert not self.engine._waiting


@contextmanager
def running_service(checkpoint: Path, catalog: Path | tuple[str, ...] | None, **settings: Any) -> Iterator[Service]:
    """A service until the end of the block; `settings` are those of ServerConfig and of EngineConfig."""
    thread = LoopThread("test-server")
    of_server = {name: settings.pop(name) for name in ServerConfig.__struct_fields__ if name in settings}
    of_engine: dict[str, Any] = {
        "catalog": str(catalog) if isinstance(catalog, Path) else catalog,
        "device": "cpu",
        "default_beam_width": 16,
    }
    engine = Engine(str(checkpoint), **(of_engine | settings))
    config = convert({"port": 0, "served_model_name": MODEL_NAME} | of_server, ServerConfig)

    async def listen() -> Server:
        server = Server(engine, config)
        await server.start()
        return server

    try:
        thread.run(engine.start())
        server = thread.run(listen())
        try:
            yield Service(engine, server, thread)
        finally:
            thread.run(engine.stop())
            thread.run(server.stop())
    finally:
        thread.close()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll until the condition holds; fails the test if it never does."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("the condition did not come true in time")


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """`wait_until` for tests that run on an event loop."""
    await asyncio.to_thread(wait_until, condition, seconds)
