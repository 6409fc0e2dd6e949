"""Every error of every route becomes a response here, in the shape that the route's clients expect."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable
from typing import Literal

import msgspec
from aiohttp import hdrs, web
from msgspec import UNSET

from widebeam.errors import MethodNotAllowed, NotFound, PayloadTooLarge, RequestError, Unauthorized
from widebeam.faults import names_meant, question
from widebeam.http.body import json_response
from widebeam.http.keys import REQUEST_ID
from widebeam.http.protocol import ErrorBody, ErrorInfo

log = logging.getLogger("widebeam.http")
Dialect = Literal["native", "sglang", "openai"]


class OpenAIErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorBody(msgspec.Struct):
    """OpenAI's form of an error."""

    error: OpenAIErrorInfo


class SGLangErrorBody(msgspec.Struct):
    """SGLang answers in a flat form or a nested one, by the kind of error: this body is readable as either."""

    message: str
    type: str
    param: str | None
    code: int
    error: ErrorInfo
    object: str = "error"


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_DEFAULT_RETRY_AFTER_S = 1.0


def as_request_error(error: Exception, request: web.Request) -> RequestError:
    """What to tell the client. An error that nobody foresaw is logged whole and told as a fixed text."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, web.HTTPNotFound):
        return NotFound(f"there is no {request.path}{question(_routes_near(request))}", code="no_such_route")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowed(f"{request.path} takes {allowed}, not {request.method}", allowed)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return PayloadTooLarge("the body is too large")
    log.exception("request %s: unforeseen error", request[REQUEST_ID], exc_info=error)
    return RequestError(f"internal error; the server's log has the details under request id {request[REQUEST_ID]}")


def _routes_near(request: web.Request) -> list[str]:
    """Routes that a path without one may stand for: spelt alike, but for `/v1` and slashes before and behind."""
    routes = {_bare(resource.canonical): resource.canonical for resource in request.app.router.resources()}
    return [routes[bare] for bare in names_meant(_bare(request.path), list(routes))]


def _bare(path: str) -> str:
    parts = path.strip("/").split("/")
    return "/".join(itertools.dropwhile(lambda part: part == "v1", parts))


def failure_response(error: RequestError, request: web.Request, dialect: Dialect) -> web.Response:
    """The error as a response of the dialect, with Retry-After on 429 and 503."""
    response = json_response(failure_body(error, request, dialect), status=error.status)
    if error.status in (429, 503):
        response.headers[hdrs.RETRY_AFTER] = str(_whole_seconds(error))
    if isinstance(error, Unauthorized):
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        response.headers[hdrs.ALLOW] = error.allowed
    return response


def failure_body(error: RequestError, request: web.Request, dialect: Dialect) -> msgspec.Struct:
    """The error in the dialect's form."""
    return _BODIES[dialect](error, request[REQUEST_ID])


def _whole_seconds(error: RequestError) -> int:
    """The wait rounded up; of a 429, at random, one more: most are so short that all would come back in one second."""
    wait_s = error.retry_after_s if error.retry_after_s is not None else _DEFAULT_RETRY_AFTER_S
    return max(1, math.ceil(wait_s)) + (random.randrange(2) if error.status == 429 else 0)


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


def _openai(error: RequestError, request_id: str) -> OpenAIErrorBody:
    kind = _OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return OpenAIErrorBody(OpenAIErrorInfo(error.message, kind, error.param, error.code))


def _sglang(error: RequestError, request_id: str) -> SGLangErrorBody:
    told = _native(error, request_id).error
    return SGLangErrorBody(error.message, str(error.status), error.param, error.status, told)


_BODIES: dict[Dialect, Callable[[RequestError, str], msgspec.Struct]] = {
    "native": _native,
    "openai": _openai,
    "sglang": _sglang,
}
ERROR_BODIES: dict[Dialect, type[msgspec.Struct]] = {
    "native": ErrorBody,
    "openai": OpenAIErrorBody,
    "sglang": SGLangErrorBody,
}
