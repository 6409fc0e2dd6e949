"""Servers that fail on purpose: one that answers by a script, and one that mistreats its connections."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from widebeam.http.sglang import GenerateResponse, RequestMeta

ANSWER = GenerateResponse(
    text="ok",
    output_ids=[7],
    meta_info=RequestMeta(
        finish_reason={"type": "length", "length": 1},
        id="a",
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        e2e_latency=0.5,
        response_sent_to_client_ts=0.5,
        normalizer="vocab",
    ),
)
"""Of /generate."""


class Peer:
    """Answers with a script: (status, headers, body) for each request in turn, then ANSWER."""

    def __init__(self) -> None:
        self.script: list[tuple[int, dict[str, str], Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.connections: set[Any] = set()
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        self.connections.add(request.transport)
        status, headers, body = self.script.pop(0) if self.script else (200, {}, msgspec.to_builtins(ANSWER))
        return web.json_response(body, status=status, headers=headers)


@asynccontextmanager
async def served(app: web.Application, **options: Any) -> AsyncIterator[str]:
    """URL of an application; `options` are those of AppRunner."""
    runner = web.AppRunner(app, access_log=None, **options)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def listening(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AbstractAsyncContextManager[str]:
    """URL of a server whose /generate is the given handler."""
    app = web.Application()
    app.router.add_post("/generate", answer)
    return served(app)


Reaction = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def after(text: bytes, then: Reaction) -> Reaction:
    async def react(writer: asyncio.StreamWriter) -> None:
        writer.write(text)
        await writer.drain()
        await then(writer)

    return react


_BODY = msgspec.json.encode(ANSWER)
GOOD = after(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY), close)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"


@asynccontextmanager
async def reacting(*reactions: Reaction) -> AsyncIterator[tuple[str, list[bytes]]]:
    """URL of a server that treats its connections in these ways, one after another; and the requests it gets."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        await reactions[len(requests) - 1](writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
