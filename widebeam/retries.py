"""What a failed answer means to the client: which exception it is, whether to try again, when, and how often at all."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import msgspec

from widebeam import errors
from widebeam.errors import MethodNotAllowed, RequestError, ServerUnreachable, WideBeamError

RETRIED_STATUSES = frozenset({408, 429, 502, 503})
"""Nobody worked on the request, or what did has failed. Not 504: more of the same would meet the same deadline. A 500
is a defect of the server, unless it is another's: Ray's proxy says so of a replica that it has lost."""
BURST = 10
CALLS_PER_RETRY = 10
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0
_SPREAD = 0.2


class RetryBudget:
    """At most one retry for ten calls in the long run, so that clients do not multiply an outage; ten in advance."""

    def __init__(self) -> None:
        self._calls = BURST * CALLS_PER_RETRY

    def earn(self) -> None:
        """A call was made."""
        self._calls = min(BURST * CALLS_PER_RETRY, self._calls + 1)

    def spend(self) -> bool:
        """Whether one more retry may be made; if so, it counts."""
        if self._calls < CALLS_PER_RETRY:
            return False
        self._calls -= CALLS_PER_RETRY
        return True


def retryable(error: WideBeamError) -> bool:
    """Trying again can help, and the server has not begun to answer."""
    if isinstance(error, ServerUnreachable):
        return error.retryable
    if not isinstance(error, RequestError):
        return False
    return error.status in RETRIED_STATUSES or (error.status == 500 and error.by_another)


def pause_s(error: WideBeamError, attempt: int) -> float:
    """Seconds before the next try: Retry-After and up to a fifth more, and full jitter over an exponential backoff."""
    told_s = getattr(error, "retry_after_s", None) or 0.0
    backoff_s = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2**attempt)
    return told_s * random.uniform(1.0, 1.0 + _SPREAD) + random.uniform(0.0, backoff_s)


class _Told(msgspec.Struct):
    """`error` in any of the server's forms, with what another server's form may lack."""

    message: str
    type: str = ""
    code: str = ""
    param: str | None = None
    request_id: str = ""
    retry_after_s: float | None = None


class _ErrorBody(msgspec.Struct):
    error: _Told


_KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)]
_BY_CODE = {kind.code: kind for kind in _KINDS}
_BY_STATUS = {kind.status: kind for kind in _KINDS} | {499: errors.Cancelled, 500: RequestError, 503: errors.NotReady}


def error_of(status: int, headers: Mapping[str, str], content: bytes) -> RequestError:
    """The exception that the server raised; by status alone if something between us and it answered."""
    by_another = False
    try:
        told = msgspec.json.decode(content, type=_ErrorBody).error
    except msgspec.DecodeError:
        by_another = True
        told = _Told(message=f"HTTP status {status}: {content[:200]!r}")
    if told.retry_after_s is None:  # else it is the exact one: the header has whole seconds
        told.retry_after_s = _seconds(headers.get("Retry-After", ""))
    kind = _BY_CODE.get(told.type) or _BY_CODE.get(told.code) or _BY_STATUS.get(status, RequestError)
    error = kind.__new__(kind)  # kinds with a constructor of their own are filled like all others
    RequestError.__init__(
        error, told.message, code=told.code or None, param=told.param, retry_after_s=told.retry_after_s
    )
    if isinstance(error, MethodNotAllowed):
        error.allowed = headers.get("Allow", "")
    if request_id := headers.get("x-request-id", told.request_id):
        error.add_note(f"request id {request_id}")
    error.status, error.by_another = status, by_another
    return error


def _seconds(retry_after: str) -> float | None:
    """Of a Retry-After header: seconds, or an HTTP date."""
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        until = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(0.0, (until.astimezone(UTC) - datetime.now(UTC)).total_seconds())
