"""What keeps a user's requests on one of several servers: `x-session-id`, by which proxies choose. For clients."""

from __future__ import annotations

import hmac
import re

from widebeam.errors import InvalidRequest

SESSION_HEADER = "x-session-id"
_SHORTEST_SECRET = 16
_ID = re.compile(r"[!-~]{1,128}")


def session_key(user_id: int | str, secret: str | bytes) -> str:
    """The session id of a user: HMAC-SHA256 of the user's id under a secret, in 64 hexadecimal digits.

    Whoever sees it on the way, in a proxy's log say, learns that two requests are of one user, but not of whom: without
    the secret no list of users can be tried. 42 is "42". All clients of a deployment need the same secret, of at least
    16 bytes (ValueError): another one sends each user to another server, whose prefix cache does not know them.
    """
    key = secret.encode() if isinstance(secret, str) else secret
    if len(key) < _SHORTEST_SECRET:
        raise ValueError(f"the secret has {len(key)} bytes: at least {_SHORTEST_SECRET}, made at random")
    return hmac.digest(key, str(user_id).encode(), "sha256").hex()


def session_headers(session_id: str | None) -> dict[str, str]:
    """The header of a call. Raises InvalidRequest for what is no header."""
    if session_id is None:
        return {}
    if not _ID.fullmatch(session_id):
        raise InvalidRequest("session_id must be 1 to 128 visible ASCII characters", param="session_id")
    return {SESSION_HEADER: session_id}
