"""Server-sent events, each sent when it is known."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from aiohttp import web

from widebeam.http.headers import complete_head
from widebeam.http.keys import EVENTS


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
        self._writing: asyncio.Task[None] | None = None
        request[EVENTS] = self

    @property
    def begun(self) -> bool:
        return self._writing is not None

    def send(self, event: Any) -> None:
        """One more event; does not wait for the client."""
        self._put(msgspec.json.encode(event))

    async def end(self) -> web.StreamResponse:
        """No event follows: what a handler returns, once the client has everything or has gone."""
        self._put(b"[DONE]")
        self._events.put_nowait(None)
        assert self._writing is not None
        await self._writing
        return self._response

    def drop(self) -> None:
        """The client has gone."""
        if self._writing is not None:
            self._writing.cancel()

    def _put(self, data: bytes) -> None:
        self._events.put_nowait(b"data: " + data + b"\n\n")
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        complete_head(self._response, self._request)
        with contextlib.suppress(ConnectionError):  # nobody is left to be told
            await self._response.prepare(self._request)
            while (data := await self._events.get()) is not None:
                await self._response.write(data)
            await self._response.write_eof()
