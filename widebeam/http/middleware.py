"""What happens around every handler: request id, API key, time limit, error mapping, metrics and one log line."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from widebeam.errors import Cancelled, InvalidRequest, RequestError
from widebeam.http.auth import Access, access_to, require
from widebeam.http.failures import Dialect, as_request_error, failure_body, failure_response
from widebeam.http.headers import ID_HEADER, TIMEOUT_HEADER, complete_head
from widebeam.http.keys import (
    EVENTS,
    FACTS,
    HAS_HEADER_ID,
    IN_FLIGHT,
    METRICS,
    REQUEST_ID,
    TIME_LIMIT,
    TimeLimit,
)
from widebeam.http.logs import RequestFacts, log_request
from widebeam.http.protocol import MAX_TIMEOUT_MS

_OPENAI_PATHS = ("/v1/chat/", "/v1/completions", "/v1/models", "/tokenize", "/detokenize")
"""OpenAI's, and vLLM's, which has the same form of errors."""
_ID = re.compile(r"[!-~]{1,128}")


def dialect_of(path: str) -> Dialect:
    """In whose form errors on a path are told, whether there is such a route or not."""
    if path == "/generate":
        return "sglang"
    return "openai" if path.startswith(_OPENAI_PATHS) else "native"


@web.middleware
async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request an id, an outcome that is counted and logged, and an answer whatever the handler raises."""
    started = time.perf_counter()
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unmatched"
    facts = request[FACTS] = RequestFacts()
    failure: RequestError | None = Cancelled("the client went away")
    status = Cancelled.status
    with request.app[IN_FLIGHT]:
        try:
            response, failure = await _answer(request, handler)
            status = response.status
            return response
        finally:
            seconds = time.perf_counter() - started
            outcome = "ok" if failure is None else type(failure).code
            engine_s = None if failure or facts.engine_ms is None else facts.engine_ms / 1e3
            request.app[METRICS].observe_request(route, outcome, seconds, engine_s)
            head = {"method": request.method, "route": route, "status": status, "outcome": outcome}
            log_request(
                _log_level(request, failure),
                head,
                facts,
                request_id=request[REQUEST_ID],
                code=None if failure is None else failure.code,
                seconds=seconds,
            )


def _log_level(request: web.Request, failure: RequestError | None) -> int:
    """What probes and scrapers read well is not worth a line in an ordinary log."""
    quiet = request.method in (hdrs.METH_GET, hdrs.METH_HEAD) and failure is None
    return logging.DEBUG if quiet else logging.INFO


async def _answer(request: web.Request, handler: Handler) -> tuple[web.StreamResponse, RequestError | None]:
    failure = None
    try:
        _take_header_id(request)
        require(request, access_to(request))
        response = await _in_time(request, handler)
    except asyncio.CancelledError:  # the client went away; whatever the handler awaited is cancelled with it
        if (events := request.get(EVENTS)) is not None:
            events.drop()
        raise
    except Exception as error:
        failure = as_request_error(error, request)
        events, dialect = request.get(EVENTS), dialect_of(request.path)
        if events is not None and events.begun:
            events.send(failure_body(failure, request, dialect))
            response = events.end()
        else:
            response = failure_response(failure, request, dialect)
    if (events := request.get(EVENTS)) is not None and events.begun:
        await events.written()  # beyond the time limit, as the body of any other response
    if not response.prepared:
        complete_head(response, request, failed=failure is not None)
    return response, failure


def _take_header_id(request: web.Request) -> None:
    given = request.headers.get(ID_HEADER)
    request[REQUEST_ID] = uuid.uuid4().hex
    request[HAS_HEADER_ID] = given is not None
    if given is not None:
        if not _ID.fullmatch(given):
            raise InvalidRequest(f"{ID_HEADER} must be 1 to 128 visible ASCII characters", param=ID_HEADER)
        request[REQUEST_ID] = given


async def _in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Run the handler within the time that its caller waits."""
    limit = request[TIME_LIMIT] = TimeLimit()
    try:
        async with limit.scope:
            if access_to(request) is not Access.PUBLIC:
                limit.tell(_header_timeout(request), TIMEOUT_HEADER)
            return await handler(request)
    except TimeoutError:
        if limit.scope.expired():
            raise limit.passed() from None
        raise


def _header_timeout(request: web.Request) -> int | None:
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", given) or not 1 <= int(given) <= MAX_TIMEOUT_MS:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} must be a whole number of milliseconds from 1 to {MAX_TIMEOUT_MS}", param=TIMEOUT_HEADER
        )
    return int(given)
