"""Which failed answers the SDK tries again, when, and how often; what it tells the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from tests.faulty import ANSWER, Peer, listening
from widebeam import AsyncClient, errors, retries


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    async with listening(peer.answer) as peer.url:
        yield peer


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The client's pauses before its retries, none of which takes time."""
    taken: list[float] = []
    real_sleep = asyncio.sleep

    async def quick(seconds: float) -> None:
        taken.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr("widebeam.transport.asyncio.sleep", quick)
    return taken


# Which answers are tried again


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
async def test_passing_troubles_are_retried(peer: Peer, pauses: list[float], status: int) -> None:
    """A 500 among them, as it is a proxy's: the server's own says what it is of."""
    peer.script = [(status, {}, None), (status, {}, None)]
    async with AsyncClient(peer.url, api_key="k-1") as client:
        assert await client.generate("a") == ANSWER
    assert (len(peer.bodies), len(pauses), len(peer.connections)) == (3, 2, 1)
    assert {headers["Authorization"] for headers in peer.headers} == {"Bearer k-1"}
    remaining = [body["timeout_ms"] for body in peer.bodies]
    assert remaining == sorted(remaining, reverse=True) and 0 < remaining[-1] <= remaining[0] <= 30_000


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (302, errors.RequestError),
        (400, errors.InvalidRequest),
        (401, errors.Unauthorized),
        (403, errors.Forbidden),
        (404, errors.NotFound),
        (405, errors.MethodNotAllowed),
        (418, errors.RequestError),
        (500, errors.RequestError),
        (504, errors.DeadlineExceeded),
    ],
)
async def test_other_errors_are_not_retried(peer: Peer, status: int, kind: type[errors.RequestError]) -> None:
    body = {"error": {"message": "a defect", "code": "internal_error"}} if status == 500 else None
    peer.script = [(status, {"Location": "/generate"}, body)]
    async with AsyncClient(peer.url) as client:
        with pytest.raises(kind) as caught:
            await client.generate("a")
    assert type(caught.value) is kind and caught.value.status == status
    assert len(peer.bodies) == 1


async def test_retries_end(peer: Peer, pauses: list[float]) -> None:
    peer.script = [(503, {}, None)] * 9
    async with AsyncClient(peer.url, max_retries=2) as client:
        with pytest.raises(errors.NotReady) as caught:
            await client.generate("a")
    assert caught.value.status == 503
    assert len(peer.bodies) == 3


async def test_the_callers_own_timeout_ms_is_kept_if_it_is_shorter(peer: Peer) -> None:
    async with AsyncClient(peer.url, timeout=30) as client:
        await client.generate("a", timeout_ms=70)
        await client.generate("a", timeout_ms=70, timeout=0.05)
    assert peer.bodies[0]["timeout_ms"] == 70 and peer.bodies[1]["timeout_ms"] <= 50


# When


async def test_retry_after_is_honoured_within_the_deadline(peer: Peer, pauses: list[float]) -> None:
    async with AsyncClient(peer.url, timeout=60) as client:
        peer.script = [(429, {"Retry-After": "7"}, None)]
        assert await client.generate("a") == ANSWER
        assert 7.0 <= pauses[0] <= 8.5
        peer.script = [(429, {"Retry-After": "7"}, None)]
        with pytest.raises(errors.Overloaded) as caught:  # there is no time left for a pause of 7 s
            await client.generate("a", timeout=5)
    assert caught.value.retry_after_s == 7.0
    assert len(peer.bodies) == 3


async def test_the_exact_time_in_the_body_is_taken_before_the_header(peer: Peer, pauses: list[float]) -> None:
    told = {"message": "full", "type": "overloaded", "code": "overloaded", "retry_after_s": 2.25}
    peer.script = [(429, {"Retry-After": "3"}, {"error": told})]
    async with AsyncClient(peer.url) as client:
        await client.generate("a")
    assert 2.25 <= pauses[0] <= 2.25 * 1.2 + 0.1


def test_retry_after_may_be_a_date_or_nonsense() -> None:
    def seconds(header: str) -> float | None:
        return retries.error_of(503, {"Retry-After": header}, b"").retry_after_s

    in_a_minute = seconds(format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True))
    assert in_a_minute is not None and 50 < in_a_minute <= 60
    assert seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert seconds("soon") is None and seconds("") is None


def test_pauses_differ_and_grow() -> None:
    told = errors.Overloaded("full", retry_after_s=10.0)
    waits = [retries.pause_s(told, 0) for _ in range(200)]
    assert 10.0 <= min(waits) < max(waits) <= 12.1 and len(set(waits)) > 190
    untold = errors.NotReady("starting")
    longest = [max(retries.pause_s(untold, attempt) for _ in range(200)) for attempt in (0, 3, 9)]
    assert longest[0] <= 0.1 < longest[1] <= 0.8 < longest[2] <= 2.0


# How often


async def test_the_retry_budget_protects_a_server_that_is_down(peer: Peer, pauses: list[float]) -> None:
    peer.script = [(502, {}, None)] * 1000
    async with AsyncClient(peer.url, max_retries=3) as client:

        async def call() -> None:
            with pytest.raises(errors.RequestError):
                await client.generate("a")

        await asyncio.gather(*(call() for _ in range(100)))
        assert len(peer.bodies) == 100 + 10  # ten in advance: all calls began when nothing was spent yet
        for _ in range(40):
            await call()
    assert len(peer.bodies) == 110 + 40 + 4  # then one for ten calls


async def test_good_calls_earn_retries(peer: Peer, pauses: list[float]) -> None:
    async with AsyncClient(peer.url, max_retries=100) as client:
        peer.script = [(502, {}, None)] * 11
        with pytest.raises(errors.RequestError):
            await client.generate("a")
        assert len(peer.bodies) == 11
        for _ in range(9):
            await client.generate("a")
        peer.script = [(502, {}, None)]
        assert await client.generate("a") == ANSWER  # the tenth call since
