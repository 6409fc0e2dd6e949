"""Server-sent events, each sent when it is known."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from widebeam.http.headers import complete_head
from widebeam.http.keys import EVENTS

LAG_BYTES = 1 << 18
"""Events of so many bytes may wait for a client before it is spared those that later ones repeat or add up."""


class EventStream:
    """The answer to a request, made event by event, and ended by `[DONE]`.

    It begins with the first event: an error before that is a plain response with its status. Events are kept until the
    client has taken them, so that one who reads slowly holds up no search.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        self._response.content_type = "text/event-stream"
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._waiting = 0
        """Bytes of them."""
        self._writing: asyncio.Task[None] | None = None
        request[EVENTS] = self

    @property
    def begun(self) -> bool:
        return self._writing is not None

    @property
    def lags(self) -> bool:
        """The client does not keep up: what can wait for a later event should."""
        return self._waiting > LAG_BYTES

    def send(self, event: Any) -> None:
        """One more event; does not wait for the client."""
        self._put(msgspec.json.encode(event))

    def end(self) -> web.StreamResponse:
        """No event follows: what a handler returns."""
        self._put(b"[DONE]")
        self._events.put_nowait(None)
        return self._response

    async def written(self) -> None:
        """Wait until the client has everything, or has gone."""
        assert self._writing is not None
        await self._writing

    def drop(self) -> None:
        """The client has gone."""
        if self._writing is not None:
            self._writing.cancel()

    def _put(self, data: bytes) -> None:
        event = b"data: " + data + b"\n\n"
        self._events.put_nowait(event)
        self._waiting += len(event)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        complete_head(self._response, self._request)
        if self._request.version < HttpVersion11:  # without chunks, only the connection's end says that it is all
            self._response.force_close()
        with contextlib.suppress(ConnectionError):  # nobody is left to be told
            await self._response.prepare(self._request)
            while (event := await self._events.get()) is not None:
                await self._response.write(event)
                self._waiting -= len(event)
            await self._response.write_eof()
