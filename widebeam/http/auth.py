"""Who may do what: API keys from files, and the class of every route.

Everything but the probes needs a key once `--api-key-file` is given; what touches other callers or shows the settings
needs one of `--admin-api-key-file`, if there is that. A route that nobody classified is for administrators.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import ipaddress
import logging
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from aiohttp import hdrs, web

from widebeam.config import ServerConfig
from widebeam.errors import ConfigError, Forbidden, Unauthorized
from widebeam.http.keys import KEYRING, SERVER_CONFIG

log = logging.getLogger("widebeam.http")
MIN_KEY_LENGTH = 16
_KEY = re.compile(r"[!-~]+")
_BEARER = re.compile(r"bearer +([!-~]+)", re.IGNORECASE)


class Access(enum.IntEnum):
    """What a route asks for and what a caller has; each includes those before it."""

    PUBLIC = 0
    USER = 1
    ADMIN = 2


ACCESS = {
    "/health": Access.PUBLIC,
    "/ping": Access.PUBLIC,
    "/ready": Access.PUBLIC,
    "/v1/recommend": Access.USER,
    "/v1/prefill": Access.USER,
    "/generate": Access.USER,
    "/v1/completions": Access.USER,
    "/v1/chat/completions": Access.USER,
    "/tokenize": Access.USER,
    "/detokenize": Access.USER,
    "/v1/models": Access.USER,
    "/v1/models/{id}": Access.USER,
    "/health_generate": Access.USER,
    "/model_info": Access.USER,
    "/get_model_info": Access.USER,
    "/version": Access.USER,
    "/metrics": Access.USER,
    "/openapi.json": Access.USER,
    "/abort_request": Access.USER,  # its handler asks for more where all requests are meant
    "/v1/catalogs": Access.ADMIN,
    "/v1/catalogs/{name}": Access.ADMIN,
    "/v1/catalogs/{name}/items": Access.ADMIN,
    "/v1/catalogs/{name}/rollback": Access.ADMIN,
    "/flush_cache": Access.ADMIN,
    "/server_info": Access.ADMIN,
    "/get_server_info": Access.ADMIN,
}


@dataclass(frozen=True)
class Keyring:
    """SHA-256 digests of the keys; the keys themselves are not kept."""

    user: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()

    @property
    def anonymous(self) -> Access:
        """What one may do without a key."""
        if self.user:
            return Access.PUBLIC
        return Access.USER if self.admin else Access.ADMIN

    def access(self, key: str) -> Access:
        """What a key is good for. Looks at every key, and at no byte of one, so that its time tells nothing."""
        digest = _digest(key)
        is_user = sum([hmac.compare_digest(digest, known) for known in self.user])
        is_admin = sum([hmac.compare_digest(digest, known) for known in self.admin])
        if is_admin or (is_user and not self.admin):
            return Access.ADMIN
        return Access.USER if is_user else self.anonymous


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def tenant_salt(request: web.Request, *named: str | None) -> str | None:
    """The `cache_salt` of a request's searches: equal only for equal API keys and equal `named` salts of the body.

    Any key counts that is sent, whether this server asks for keys or not; all callers without one are one tenant, and
    have none if they name none. It is a digest, from which nobody finds the key.
    """
    told = [_bearer(request), *named]
    if not any(told):
        return None
    return hashlib.sha256(b"".join(_digest(part or "") for part in told)).hexdigest()


def _bearer(request: web.Request) -> str | None:
    """The API key that came with a request."""
    told = request.headers.getall(hdrs.AUTHORIZATION, [])
    bearer = _BEARER.fullmatch(told[0]) if len(told) == 1 else None  # of two, who says which counts?
    return bearer[1] if bearer else None


def access_to(request: web.Request) -> Access:
    """The class of the route that was found, never of the path's text. Unknown paths need a key like known ones."""
    resource = request.match_info.route.resource
    return Access.USER if resource is None else ACCESS.get(resource.canonical, Access.ADMIN)


def require(request: web.Request, needed: Access) -> None:
    """Raises Unauthorized without a good key, Forbidden with one that is not good enough."""
    keyring = request.app[KEYRING]
    key = _bearer(request)
    granted = keyring.access(key) if key else keyring.anonymous
    if granted >= needed:
        return
    if granted > keyring.anonymous:
        raise Forbidden("this needs an administrator's API key")
    raise Unauthorized("an API key is needed: send the header `Authorization: Bearer KEY` with a key of this server")


async def load_keyring(app: web.Application) -> None:
    """Startup hook: read the key files, and warn of a server that is open to other machines. Raises ConfigError."""
    config = app[SERVER_CONFIG]
    user, admin = await asyncio.gather(
        asyncio.to_thread(_read, "--api-key-file", config.api_key_file),
        asyncio.to_thread(_read, "--admin-api-key-file", config.admin_api_key_file),
    )
    app[KEYRING] = Keyring(user, admin)
    if not user and not _is_loopback(config):
        log.warning(
            "there is no --api-key-file: whoever reaches %s port %d may use this server", config.host, config.port
        )


def _read(flag: str, file: str | None) -> tuple[bytes, ...]:
    """Digests of a file's keys, one a line; empty lines and those that begin with `#` are left out."""
    if file is None:
        return ()
    path = Path(file)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag}: {path} is not UTF-8") from None
    stripped = {number: line.strip() for number, line in enumerate(lines, 1)}
    keys = {number: line for number, line in stripped.items() if line and not line.startswith("#")}
    for number, key in keys.items():
        if len(key) < MIN_KEY_LENGTH or not _KEY.fullmatch(key):
            raise ConfigError(
                f"{flag}: line {number} of {path} is not a key: at least {MIN_KEY_LENGTH} visible ASCII characters"
            )
    if not keys:
        raise ConfigError(f"{flag}: {path} has no keys")
    if mode & stat.S_IROTH:
        log.warning("%s: every user of this machine can read %s (chmod o-r)", flag, path)
    return tuple(_digest(key) for key in keys.values())


def _is_loopback(config: ServerConfig) -> bool:
    try:
        return ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        return config.host == "localhost"
