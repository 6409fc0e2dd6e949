"""The client's calls over HTTP: kept connections, one deadline for all tries of a call, whole answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeVar

import aiohttp
import msgspec

from widebeam.errors import DeadlineExceeded, InvalidRequest, RequestError, ServerUnreachable
from widebeam.retries import RetryBudget, error_of, pause_s, retryable

T = TypeVar("T")

Data = bytes | IO[bytes] | None
"""A body of JSON, a file, or none."""
Body = Callable[[float], Data]
"""Makes the body of a try that has so many seconds left."""
_CONNECT_TIMEOUT_S = 5.0


class Transport:
    """Connections to one server, for the event loop that makes the calls; for the next one when that is closed."""

    def __init__(self, base_url: str, api_key: str | None, max_retries: int, max_connections: int) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, not {base_url!r}")
        self._base_url = base_url.rstrip("/").removesuffix("/v1")  # as OpenAI's SDK is given it
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._max_retries = max_retries
        self._max_connections = max_connections
        self._budget = RetryBudget()
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def close(self) -> None:
        """Close the connections: calls that still run fail, and there can be no more. Closing twice is fine."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        path: str,
        kind: Any,
        body: Body,
        within_s: float,
        *,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
    ) -> Any:
        """The answer to a call, after as many tries as it takes; after one if it may not be repeated."""
        check_timeout(within_s)
        deadline = time.monotonic() + within_s
        self._budget.earn()
        attempt = 0
        while True:
            remaining_s = deadline - time.monotonic()
            try:
                status, told, content = await self.exchange(method, path, body(remaining_s), remaining_s, headers)
                if status == 200:
                    return self.decode(content, kind)
                raise error_of(status, told, content)
            except (RequestError, ServerUnreachable) as error:
                pause = pause_s(error, attempt)
                may = (
                    repeatable
                    and attempt < self._max_retries
                    and time.monotonic() + pause < deadline
                    and not self._closed
                )
                if not (may and retryable(error) and self._budget.spend()):
                    raise
            await asyncio.sleep(pause)
            attempt += 1

    async def exchange(
        self, method: str, path: str, data: Data, within_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """One try: status, headers and content of a whole answer."""
        media = "application/json" if isinstance(data, bytes) else "application/octet-stream"
        sent = {**(headers or {}), **({} if data is None else {"Content-Type": media})}
        url = self._base_url + path
        begun = False
        try:
            async with (
                asyncio.timeout(within_s),
                self._connections().request(method, url, data=data, headers=sent, allow_redirects=False) as response,
            ):
                begun = True
                return response.status, response.headers, await response.read()
        except aiohttp.ClientError as error:  # before TimeoutError: connecting has a timeout of its own, which is both
            raise ServerUnreachable(_said(error, url), retryable=not begun and _unheard(error)) from error
        except TimeoutError:
            raise DeadlineExceeded(f"no answer from {url} within the timeout", code="client_timeout") from None

    def decode(self, content: bytes, kind: type[T]) -> T:
        """A good answer. Raises ServerUnreachable if it is not one of ours."""
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:
            message = f"{self._base_url} does not answer as WideBeam: {error}"
            raise ServerUnreachable(message, retryable=False) from None

    def _connections(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("this client is closed")
        loop = asyncio.get_running_loop()
        if self._session is not None and self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("this AsyncClient is in use on another event loop; threads can share a Client")
            self._session.detach()  # its sockets went with their loop
            self._session = None
        if self._session is None:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            )
            self._session._retry_connection = False  # aiohttp's own retries of GET would evade the budget
        return self._session


def check_timeout(timeout: float) -> None:
    """Raise ValueError for a time in which nothing can be answered."""
    if not timeout > 0:
        raise ValueError(f"timeout must be over 0 seconds, not {timeout!r}")


def _unheard(error: aiohttp.ClientError) -> bool:
    """No byte of an answer was understood."""
    half_a_head = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
    return isinstance(error, aiohttp.ClientConnectionError) and not half_a_head


def _said(error: aiohttp.ClientError, url: str) -> str:
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return f"{url} closed the connection before it had answered"
    return f"no answer from {url}: {error}"


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON of the fields that are given. Arrays and their scalars become plain numbers."""
    given = {key: value for key, value in body.items() if value is not None}
    try:
        return json.dumps(given, default=_plain, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise InvalidRequest(f"a number is not finite: {error}") from None


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else msgspec.to_builtins(value)
