"""What happens around every handler: request id, drain, error mapping, metrics and one log line."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from widebeam.errors import Cancelled, InvalidRequest
from widebeam.http.failures import Dialect, as_request_error, failure_response
from widebeam.http.keys import ENGINE, HAS_HEADER_ID, IN_FLIGHT, METRICS, REQUEST_ID

log = logging.getLogger("widebeam.http")
ID_HEADER = "x-request-id"
_ID = re.compile(r"[!-~]{1,128}")


def _dialect(path: str) -> Dialect:
    if path == "/generate":
        return "sglang"
    return "openai" if path.startswith(("/v1/chat/", "/v1/models")) else "native"


@web.middleware
async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request an id, an outcome that is counted and logged, and an answer whatever the handler raises."""
    started = time.perf_counter()
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unmatched"
    outcome, status = Cancelled.code, Cancelled.status
    with request.app[IN_FLIGHT]:
        try:
            response, outcome = await _answer(request, handler)
            status = response.status
            return response
        finally:
            elapsed = time.perf_counter() - started
            request.app[METRICS].observe_request(route, outcome, elapsed)
            level = logging.DEBUG if request.method == hdrs.METH_GET else logging.INFO
            form = "%s %s %d %s %.1f ms id=%s"
            log.log(level, form, request.method, route, status, outcome, elapsed * 1e3, request[REQUEST_ID])


async def _answer(request: web.Request, handler: Handler) -> tuple[web.StreamResponse, str]:
    outcome = "ok"
    try:
        _take_header_id(request)
        response = await handler(request)
    except asyncio.CancelledError:  # the client went away; whatever the handler awaited is cancelled with it
        raise
    except Exception as error:
        failure = as_request_error(error, request)
        outcome = type(failure).code
        response = failure_response(failure, request, _dialect(request.path))
    response.headers[ID_HEADER] = request[REQUEST_ID]
    if request.app[ENGINE].state != "ready":  # a client that reconnects finds a server that stays
        response.force_close()
    return response, outcome


def _take_header_id(request: web.Request) -> None:
    given = request.headers.get(ID_HEADER)
    request[REQUEST_ID] = uuid.uuid4().hex
    request[HAS_HEADER_ID] = given is not None
    if given is not None:
        if not _ID.fullmatch(given):
            raise InvalidRequest(f"{ID_HEADER} must be 1 to 128 visible ASCII characters", param=ID_HEADER)
        request[REQUEST_ID] = given
