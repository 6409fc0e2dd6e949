"""A server that answers as a test says, to be loaded."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from loadgen import Request

SEARCH = Request("/generate", b"{}")


@asynccontextmanager
async def fake(answer: Callable[[int, bytes], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The URL of a server whose k-th answer is what a coroutine makes of k and the body. It has no metrics."""
    count = itertools.count()

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(next(count), await request.read())

    app = web.Application()
    app.router.add_post("/generate", handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def good() -> web.Response:
    return web.json_response({"text": "", "output_ids": [1], "meta_info": {"e2e_latency": 0.5, "beam_results": []}})


def consistent(level: dict[str, Any]) -> bool:
    return level["sent"] == level["ok"] + level["refused"] + sum(level["failed"].values()) > 0
