"""What keeps a user on one server: its key, and the header that each call sends. tests/deploy has the real proxies."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.faulty import ANSWER, GOOD, after, close, reacting
from widebeam import AsyncClient, errors, session_key

SECRET = "0123456789abcdef"
REFUSED = after(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", close)
CALLS: dict[str, Callable[..., Awaitable[Any]]] = {
    "recommend": lambda client, **session: client.recommend(history=[1], **session),
    "prefill": lambda client, **session: client.prefill(history=[1], **session),
    "generate": lambda client, **session: client.generate("a", **session),
    "chat": lambda client, **session: client.chat([{"role": "user", "content": "a"}], **session),
    "completions": lambda client, **session: client.completions("a", **session),
    "abort": lambda client, **session: client.abort("r", **session),
}


def test_the_key_is_hmac_sha256() -> None:
    """RFC 4231, test case 6."""
    data = "Test Using Larger Than Block-Size Key - Hash Key First"
    assert session_key(data, b"\xaa" * 131) == "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"


def test_a_key_is_of_a_user_and_a_secret() -> None:
    assert session_key(42, SECRET) == session_key("42", SECRET.encode())
    keys = {session_key(user, secret) for user in (42, 43, "ü") for secret in (SECRET, SECRET + "0")}
    assert len(keys) == 6 and all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)
    for short in ("", "x" * 15, b"x" * 15):
        with pytest.raises(ValueError, match="at least 16"):
            session_key(42, short)


def sent(request: bytes) -> list[str]:
    return re.findall(r"^x-session-id: (.*)\r$", request.decode(), re.MULTILINE | re.IGNORECASE)


@pytest.mark.parametrize("call", CALLS)
async def test_every_call_sends_the_session_once_if_it_has_one(call: str) -> None:
    key = session_key("user", SECRET)
    async with reacting(REFUSED, REFUSED) as (url, requests), AsyncClient(url) as client:
        for session in ({"session_id": key}, {}):
            with pytest.raises(errors.InvalidRequest):
                await CALLS[call](client, **session)
    assert [sent(request) for request in requests] == [[key], []]


async def test_each_try_sends_it() -> None:
    async with reacting(close, GOOD) as (url, requests), AsyncClient(url) as client:
        assert await client.generate("a", session_id="s") == ANSWER
    assert [sent(request) for request in requests] == [["s"], ["s"]]


@pytest.mark.parametrize("wrong", ["", "a b", "a\r\nx-other: b", "ü", "x" * 129])
async def test_what_is_no_header_is_not_sent(wrong: str) -> None:
    async with AsyncClient("http://127.0.0.1:1") as client:
        for call in CALLS.values():
            with pytest.raises(errors.InvalidRequest) as caught:
                await call(client, session_id=wrong)
            assert caught.value.param == "session_id"
