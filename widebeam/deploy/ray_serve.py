"""One model as a Ray Serve application: `import_path: widebeam.deploy.ray_serve:app`; docs/ray.md says how.

A replica is an engine behind the same server as `widebeam serve`, on a free port of loopback. What Ray's proxy has for
the replica goes there, and the answer comes back part by part: every route and every error is the server's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import hdrs
from yarl import URL

from widebeam.deploy.ray_config import ROWS, RayConfig, deployment_options, engine_config, read_config, server_config
from widebeam.errors import Conflict, how_to_install
from widebeam.http.headers import ID_HEADER
from widebeam.http.logs import configure
from widebeam.http.protocol import ErrorBody, ErrorInfo
from widebeam.http.server import Server

try:
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
except ImportError as error:
    raise ImportError(f"widebeam.deploy.ray_serve needs Ray: {how_to_install('ray')} ({error})") from error

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.types import Scope

_OF_ONE_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
_NOT_FORWARDED = _OF_ONE_HOP | {"expect"}
_NOT_RETURNED = _OF_ONE_HOP | {"date", "server", ID_HEADER}
"""The last three are written by the proxy, the id as it came or as the proxy made it."""
_CATALOGS, _CHANGES = "/v1/catalogs/", ("PUT", "POST", "DELETE")
_CONNECT_TIMEOUT_S = 5.0


class WideBeam:
    """A replica. Ray Serve calls all of it on one event loop, on which engine and server live too.

    What is not `__call__` or asked by Ray is for `handle.broadcast`, which calls it on every replica, and catalogs for
    `publishing.publish_catalog`.
    """

    async def __init__(self, config: RayConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        """Load everything and listen. Raises StartupError."""
        from widebeam.engine.engine import Engine

        configure(config.server.log_level, config.server.log_format)
        self._engine = Engine(engine_config(config))
        self._server = Server(self._engine, server_config(config))
        await self._engine.start()
        await self._server.start()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=config.server.keepalive_timeout_s / 2),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=(hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE, hdrs.USER_AGENT),
            auto_decompress=False,
        )
        self._engine.freeze()

    async def __call__(self, request: Request) -> Response:
        """One request of any route. If the caller goes away, Ray cancels this, and with it the search."""
        scope = request.scope
        # the path as routes see it: behind the application's prefix, and without escapes
        if request.method in _CHANGES and scope["path"].removeprefix(scope["root_path"]).startswith(_CATALOGS):
            return _refused_change(request)
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        answer = await self._session.request(
            request.method,
            URL(self._server.url + _target(scope), encoded=True),
            headers=[(name, value) for name, value in request.headers.items() if name not in _NOT_FORWARDED],
            data=request.stream() if has_body else None,
            allow_redirects=False,
        )
        response = StreamingResponse(_parts(answer), answer.status)
        lower = [(name.lower(), value) for name, value in answer.raw_headers]
        response.raw_headers = [(name, value) for name, value in lower if name.decode("latin-1") not in _NOT_RETURNED]
        return response

    async def check_health(self) -> None:
        """Raise if the server's own /health is not good: Ray then replaces the replica."""
        async with self._session.get(f"{self._server.url}/health") as answer:
            if answer.status != 200:
                raise RuntimeError(f"/health: {answer.status} {await answer.text()}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What RowsPolicy adds up."""
        return {ROWS: self._engine.stats().rows_in_flight}

    async def load_catalog(self, path: str | Path, name: str | None = None) -> int:
        """Load a catalog file, which every node must have, while requests are answered; its version here.

        A replica that starts later loads what its settings say: write it there too. Raises CatalogError.
        """
        return (await self._engine.load_catalog(path, name)).version

    async def stage_catalog(self, path: str, name: str, version: int | None) -> int:
        """Do all that loading a catalog file takes, but offer it; its version. Raises CatalogError, Conflict."""
        return (await self._engine.staged.stage(path, name, version)).version

    async def commit_catalog(self, name: str, version: int) -> int:
        """Offer what is staged. Raises Conflict."""
        return (await self._engine.staged.commit(name, version)).version

    async def discard_catalog(self, name: str) -> None:
        """Let go of what is staged."""
        self._engine.staged.discard(name)

    async def abort(self, request_id: str | None) -> int:
        """End the searches of an id, or all; how many there were here."""
        return self._engine.abort(request_id)

    async def flush_prefixes(self) -> None:
        """Forget what the prefix cache holds."""
        await self._engine.flush_prefixes()

    async def __del__(self) -> None:
        """Ray calls this when the replica has no request any more, or its time is over."""
        await self._server.drain()
        await self._engine.stop()
        await self._server.stop()
        await self._session.close()


def _target(scope: Scope) -> str:
    """Path and query as they came, behind the prefix of the application."""
    path = scope["raw_path"].decode("ascii").removeprefix(scope["root_path"]) or "/"
    query = scope["query_string"].decode("ascii")
    return f"{path}?{query}" if query else path


async def _parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for part in answer.content.iter_any():
            yield part


def _refused_change(request: Request) -> Response:
    """The answer to a change of catalogs, which would reach one replica and be gone with it."""
    refusal = Conflict(
        "behind Ray Serve a request reaches one replica of several: change catalogs by publish_catalog, by files "
        "that all watch (watch_catalogs), or by a new configuration",
        code="one_of_several_replicas",
    )
    info = ErrorInfo(
        type=Conflict.code,
        code=refusal.code,
        message=refusal.message,
        param=None,
        request_id=request.headers.get(ID_HEADER, ""),
        retryable=False,
    )
    body = msgspec.json.encode(ErrorBody(error=info))
    return Response(body, refusal.status, media_type="application/json")


def app(args: dict[str, Any]) -> Application:
    """The application that the `args` of a Serve config describe: engine, server and replica. Raises ConfigError."""
    config = read_config(args)
    return serve.deployment(**deployment_options(config))(WideBeam).bind(config)
