"""Typed keys of what the application and each request carry."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from widebeam.config import ServerConfig
from widebeam.errors import Draining, EngineDead, NotReady

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine
    from widebeam.http.metrics import Metrics


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


ENGINE: web.AppKey[Engine] = web.AppKey("engine")
METRICS: web.AppKey[Metrics] = web.AppKey("metrics")
SERVER_CONFIG = web.AppKey("server_config", ServerConfig)
IN_FLIGHT = web.AppKey("in_flight", InFlight)
STARTED_AT = web.AppKey("started_at", float)
REQUEST_ID = web.RequestKey("request_id", str)
HAS_HEADER_ID = web.RequestKey("has_header_id", bool)


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


def served_name(request: web.Request) -> str:
    """The model's name as clients see it."""
    return request.app[SERVER_CONFIG].served_model_name or request.app[ENGINE].config.model


def adopt_id(request: web.Request, body_id: str | None) -> str:
    """The id of this request: the body's, else the header's, else a new one. Errors and logs then carry it too."""
    if body_id is not None and not request[HAS_HEADER_ID]:
        request[REQUEST_ID] = body_id
    return body_id or request[REQUEST_ID]
