"""Every error of every route becomes a response here, in the shape that the route's clients expect."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

from aiohttp import hdrs, web
from msgspec import UNSET

from widebeam.errors import MethodNotAllowed, NotFound, PayloadTooLarge, RequestError
from widebeam.http.body import json_response
from widebeam.http.keys import REQUEST_ID
from widebeam.http.protocol import ErrorBody, ErrorInfo

log = logging.getLogger("widebeam.http")
Dialect = Literal["native", "sglang", "openai"]

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_DEFAULT_RETRY_AFTER_S = 1.0


def as_request_error(error: Exception, request: web.Request) -> RequestError:
    """What to tell the client. An error that nobody foresaw is logged whole and told as a fixed text."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, web.HTTPNotFound):
        return NotFound(f"there is no {request.path}", code="no_such_route")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowed(f"{request.path} takes {allowed}, not {request.method}", allowed)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return PayloadTooLarge("the body is too large")
    log.exception("request %s: unforeseen error", request[REQUEST_ID], exc_info=error)
    return RequestError(f"internal error; the server's log has the details under request id {request[REQUEST_ID]}")


def failure_response(error: RequestError, request: web.Request, dialect: Dialect) -> web.Response:
    """The error as a response of the dialect, with Retry-After on 429 and 503."""
    body = _BODIES[dialect](error, request[REQUEST_ID])
    response = json_response(body, status=error.status)
    if error.status in (429, 503):
        wait_s = error.retry_after_s if error.retry_after_s is not None else _DEFAULT_RETRY_AFTER_S
        response.headers[hdrs.RETRY_AFTER] = str(max(1, math.ceil(wait_s)))
    if isinstance(error, MethodNotAllowed):
        response.headers[hdrs.ALLOW] = error.allowed
    return response


def _native(error: RequestError, request_id: str) -> ErrorBody:
    return ErrorBody(
        error=ErrorInfo(
            type=type(error).code,
            code=error.code,
            message=error.message,
            param=error.param,
            request_id=request_id,
            retryable=error.retryable,
            retry_after_s=UNSET if error.retry_after_s is None else round(error.retry_after_s, 3),
        )
    )


def _openai(error: RequestError, request_id: str) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _sglang(error: RequestError, request_id: str) -> dict[str, Any]:
    """SGLang answers in a flat form or a nested one, by the kind of error: this body is readable as either."""
    flat = {"object": "error", "message": error.message, "type": str(error.status), "param": error.param}
    return {**flat, "code": error.status, "error": _native(error, request_id).error}


_BODIES = {"native": _native, "openai": _openai, "sglang": _sglang}
