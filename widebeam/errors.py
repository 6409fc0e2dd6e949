"""Every error that WideBeam raises on purpose.

WideBeamError
|-- RequestError                 the caller can act on it; carries the HTTP status
|   |-- InvalidRequest     400
|   |-- Unauthorized       401   no key, or a wrong one
|   |-- Forbidden          403   the key may not do that
|   |-- NotFound           404
|   |-- MethodNotAllowed   405
|   |-- RequestTimeout     408   the body did not arrive in time
|   |-- Conflict           409   what is to be changed is not as the caller thinks
|   |-- PayloadTooLarge    413
|   |-- Overloaded         429   retry later
|   |-- Cancelled          499   the client went away
|   |-- Aborted            499   somebody asked for its end
|   |-- EngineError        500   the search failed
|   |-- OutOfMemory        503   the wave failed, the server goes on
|   |-- NotReady           503   starting
|   |-- CatalogVersionNotReady   503   the catalog is older here than the request wants it
|   |-- Draining           503   stopping
|   |-- EngineDead         503   the GPU thread is gone
|   `-- DeadlineExceeded   504
|-- ServerUnreachable            the client got no answer
`-- StartupError                 the process cannot start: one line, exit status 2
    |-- ConfigError
    |-- CheckpointError
    `-- CatalogError
        `-- CatalogUnreachable   another time it may be there
"""

from __future__ import annotations


class WideBeamError(Exception):
    """Base of all errors raised on purpose. The message is safe to show to a client.

    `code` is a stable snake_case word that programs may match on; `status` is the HTTP status, None of what is no
    answer; `param` names the request field at fault, if any; `retryable`: the same may go well another time, and
    `retry_after_s` says when, where that is known. `by_another`: in a client, of an answer that is not in the server's
    form, as that of a proxy before it.
    """

    code = "internal_error"
    status: int | None = None
    param: str | None = None
    retryable = False
    retry_after_s: float | None = None
    by_another = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(WideBeamError):
    """An error that ends one request."""

    status: int = 500

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    status, code = 400, "invalid_request"


class Unauthorized(RequestError):
    status, code = 401, "unauthorized"


class Forbidden(RequestError):
    status, code = 403, "forbidden"


class NotFound(RequestError):
    status, code = 404, "not_found"


class MethodNotAllowed(RequestError):
    """`allowed` lists the methods that the route takes."""

    status, code = 405, "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class RequestTimeout(RequestError):
    status, code, retryable = 408, "request_timeout", True


class Conflict(RequestError):
    status, code = 409, "conflict"


class PayloadTooLarge(RequestError):
    status, code = 413, "payload_too_large"


class Overloaded(RequestError):
    status, code, retryable = 429, "overloaded", True


class Cancelled(RequestError):
    status, code = 499, "cancelled"


class Aborted(RequestError):
    status, code = 499, "aborted"


class EngineError(RequestError):
    status, code = 500, "engine_error"


class OutOfMemory(RequestError):
    status, code, retryable = 503, "out_of_memory", True


class NotReady(RequestError):
    status, code, retryable = 503, "not_ready", True


class CatalogVersionNotReady(RequestError):
    status, code, retryable = 503, "catalog_version_not_ready", True


class Draining(RequestError):
    status, code, retryable = 503, "draining", True


class EngineDead(RequestError):
    status, code, retryable = 503, "engine_dead", True


class DeadlineExceeded(RequestError):
    status, code = 504, "deadline_exceeded"


class ServerUnreachable(WideBeamError):
    """No answer: no connection could be made, or it broke. `retryable` if no part of an answer had arrived."""

    code = "server_unreachable"

    def __init__(self, message: str, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class StartupError(WideBeamError):
    """The process cannot start with what it was given. Printed as one line; exit status 2."""

    code = "startup_error"


class ConfigError(StartupError):
    """A setting is wrong or does not fit the machine."""

    code = "invalid_config"


class CheckpointError(StartupError):
    """The model folder is incomplete, inconsistent or of a kind that is not supported."""

    code = "invalid_checkpoint"


class CatalogError(StartupError):
    """A catalog file is wrong. `problems` lists what is wrong, a line each, where there is more than one."""

    code = "invalid_catalog"

    def __init__(self, message: str, problems: list[str] | None = None) -> None:
        super().__init__(message)
        self.problems = problems or [message]


class CatalogUnreachable(CatalogError):
    """An object store did not give a catalog, or not in one piece; another time it may."""

    code, retryable = "catalog_unreachable", True


def how_to_install(extra: str) -> str:
    """What brings an extra's packages along; WideBeam itself is on no package index."""
    return f"pip install -e '.[{extra}]' in a clone of WideBeam"
