"""Typed keys of what the application and each request carry."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from widebeam.config import ServerConfig
from widebeam.errors import DeadlineExceeded, Draining, EngineDead, NotReady

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine
    from widebeam.http.auth import Keyring
    from widebeam.http.logs import RequestFacts
    from widebeam.http.metrics import Metrics
    from widebeam.http.streaming import EventStream


class InFlight:
    """Counts the requests whose handler has not finished."""

    def __init__(self) -> None:
        self.count = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def __enter__(self) -> None:
        self.count += 1
        self.idle.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if self.count == 0:
            self.idle.set()


class TimeLimit:
    """Until when a request's caller waits, from its arrival on: the shortest of the times that were told."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = self._loop.time()
        self._told: tuple[int, str] | None = None
        self.scope = asyncio.timeout(None)
        """To be entered around all work for the request."""

    def tell(self, timeout_ms: int | None, param: str) -> None:
        """`param` names where the time was told. Raises DeadlineExceeded if it has passed already."""
        if timeout_ms is None or (self._told is not None and self._told[0] <= timeout_ms):
            return
        self._told = (timeout_ms, param)
        end = self._arrived + timeout_ms / 1e3
        if end <= self._loop.time():
            raise self.passed()
        self.scope.reschedule(end)

    def passed(self) -> DeadlineExceeded:
        timeout_ms, param = self._told or (0, "")
        return DeadlineExceeded(f"no answer within {timeout_ms} ms", param=param)


ENGINE: web.AppKey[Engine] = web.AppKey("engine")
METRICS: web.AppKey[Metrics] = web.AppKey("metrics")
SERVER_CONFIG = web.AppKey("server_config", ServerConfig)
IN_FLIGHT = web.AppKey("in_flight", InFlight)
LEAVING = web.AppKey("leaving", asyncio.Event)
"""Set when the server is told to stop, which may be before it refuses new work."""
UPLOADS = web.AppKey("uploads", asyncio.Semaphore)
STARTED_AT = web.AppKey("started_at", float)
KEYRING: web.AppKey[Keyring] = web.AppKey("keyring")
REQUEST_ID = web.RequestKey("request_id", str)
HAS_HEADER_ID = web.RequestKey("has_header_id", bool)
TIME_LIMIT = web.RequestKey("time_limit", TimeLimit)
FACTS: web.RequestKey[RequestFacts] = web.RequestKey("facts")
EVENTS: web.RequestKey[EventStream] = web.RequestKey("events")
"""Of requests that are answered event by event."""


def server_state(app: web.Application) -> str:
    """The engine's state; `draining` also while new work is still accepted, but should go elsewhere."""
    state = app[ENGINE].state
    return "draining" if state == "ready" and app[LEAVING].is_set() else state


def working_engine(request: web.Request) -> Engine:
    """The engine, if it takes work; otherwise raises the 503 that says why not, before the body is read."""
    engine = request.app[ENGINE]
    if engine.state == "ready":
        return engine
    if engine.state == "starting":
        raise NotReady("the server is still starting", retry_after_s=5)
    if engine.state == "dead":
        raise EngineDead("the engine has failed; the server needs a restart", retry_after_s=30)
    raise Draining("the server is shutting down", retry_after_s=5)


def limit_time(request: web.Request, timeout_ms: int | None) -> None:
    """Take the body's time limit beside the header's: both count from the request's arrival, the shorter one holds."""
    request[TIME_LIMIT].tell(timeout_ms, "timeout_ms")


def served_name(request: web.Request) -> str:
    """The model's name as clients see it."""
    return request.app[SERVER_CONFIG].served_model_name or request.app[ENGINE].config.model


def adopt_id(request: web.Request, body_id: str | None) -> str:
    """The id of this request: the body's, else the header's, else a new one. Errors and logs then carry it too."""
    if body_id is not None and not request[HAS_HEADER_ID]:
        request[REQUEST_ID] = body_id
    return body_id or request[REQUEST_ID]
