"""A server that answers as a test says, to be loaded."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from aiohttp import web
from loadgen import Request

from tests.faulty import served

SEARCH = Request("/generate", b"{}")


def fake(answer: Callable[[int, bytes], Awaitable[web.StreamResponse]]) -> AbstractAsyncContextManager[str]:
    """The URL of a server whose k-th answer is what a coroutine makes of k and the body. It has no metrics."""
    count = itertools.count()

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(next(count), await request.read())

    app = web.Application()
    app.router.add_post("/generate", handle)
    return served(app, handler_cancellation=True)


def good() -> web.Response:
    return web.json_response({"text": "", "output_ids": [1], "meta_info": {"e2e_latency": 0.5, "beam_results": []}})


def consistent(level: dict[str, Any]) -> bool:
    return level["sent"] == level["ok"] + level["refused"] + sum(level["failed"].values()) > 0
