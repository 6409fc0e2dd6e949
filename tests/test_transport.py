"""The SDK against connections that fail, and answers that are not ours."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
from aiohttp import web

from tests.faulty import ANSWER, GOOD, HEAD, Peer, Reaction, after, close, listening, reacting, reset
from widebeam import AsyncClient, errors, transport
from widebeam.errors import RequestError, ServerUnreachable


@pytest.mark.parametrize("failure", [close, reset], ids=["closed", "reset"])
async def test_a_connection_that_breaks_before_the_answer_is_tried_again(failure: Reaction) -> None:
    async with reacting(failure, GOOD) as (url, requests), AsyncClient(url) as client:
        assert await client.generate("a") == ANSWER
    assert len(requests) == 2


@pytest.mark.parametrize(
    "failure",
    [after(HEAD, close), after(HEAD, reset), after(HEAD[:20], close), after(b"SSH-2.0-nothing\r\n", close)],
    ids=["body closed", "body reset", "half a head", "another protocol"],
)
@pytest.mark.parametrize("method", ["generate", "models"])
async def test_an_answer_that_has_begun_is_not_repeated(failure: Reaction, method: str) -> None:
    async with reacting(failure, GOOD) as (url, requests), AsyncClient(url) as client:
        with pytest.raises(ServerUnreachable) as caught:
            await (client.generate("a") if method == "generate" else client.models())
    assert caught.value.retryable is False
    assert len(requests) == 1


async def test_every_try_counts_also_for_get() -> None:
    async with reacting(*[close] * 9) as (url, requests), AsyncClient(url, max_retries=1) as client:
        with pytest.raises(ServerUnreachable):
            await client.models()
        assert len(requests) == 2
        with pytest.raises(ServerUnreachable):
            await client.health()
        assert len(requests) == 3


async def test_a_dead_address_is_unreachable_after_its_retries() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        async with AsyncClient(f"http://127.0.0.1:{taken.getsockname()[1]}", max_retries=1) as client:
            with pytest.raises(ServerUnreachable) as caught:
                await client.models()
            with pytest.raises(ServerUnreachable):
                await client.health()
    error = caught.value
    assert (error.code, error.status, error.param, error.message) == ("server_unreachable", None, None, str(error))
    assert vars(RequestError("x")).keys() <= {name for name in dir(error) if not name.startswith("_")}


async def test_an_address_that_does_not_react_is_unreachable_within_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "_CONNECT_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        async with AsyncClient(f"http://127.0.0.1:{full.getsockname()[1]}", max_retries=0) as client:
            with pytest.raises(ServerUnreachable) as caught:
                await client.models()
    assert caught.value.retryable is True


@pytest.mark.parametrize("cancelled", [False, True], ids=["deadline", "cancelled"])
async def test_giving_up_closes_the_connection(cancelled: bool) -> None:
    gone = asyncio.Event()
    asked = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        while await reader.read(65536):
            pass
        gone.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, AsyncClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        call = asyncio.create_task(client.generate("a", timeout=60 if cancelled else 0.05))
        await asked.wait()
        if cancelled:
            call.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else errors.DeadlineExceeded):
            await call
        await asyncio.wait_for(gone.wait(), 10)


# What else a server may answer


async def test_redirects_are_not_followed_with_the_key() -> None:
    peer, elsewhere = Peer(), Peer()
    async with listening(peer.answer) as url, listening(elsewhere.answer) as other:
        peer.script = [(307, {"Location": other + "/generate"}, None)]
        async with AsyncClient(url, api_key="k-1") as client:
            with pytest.raises(errors.RequestError) as caught:
                await client.generate("a")
    assert caught.value.status == 307 and elsewhere.bodies == []


async def test_an_answer_that_is_not_ours_is_named() -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>welcome</html>")

    async with listening(page) as url, AsyncClient(url) as client:
        with pytest.raises(ServerUnreachable, match="does not answer as WideBeam"):
            await client.generate("a")


async def test_an_answer_of_ten_megabytes_on_one_line() -> None:
    long = msgspec.structs.replace(ANSWER, text="x" * 10_000_000)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(long), content_type="application/json")

    async with listening(answer) as url, AsyncClient(url) as client:
        assert await client.generate("a") == long


async def test_no_more_connections_than_asked_for() -> None:
    peer = Peer()
    async with listening(peer.answer) as url, AsyncClient(url, max_connections=3) as client:
        await asyncio.gather(*(client.generate("a") for _ in range(30)))
    assert len(peer.bodies) == 30 and len(peer.connections) <= 3


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="http://"):
        AsyncClient("127.0.0.1:8000")
