"""What a killed server cost, against three servers behind one address whose every answer is known."""

from __future__ import annotations

import asyncio
import zlib
from contextlib import AbstractAsyncContextManager

import failover
import pytest
from aiohttp import web
from failover import Round, Sent
from loadgen import Request, Sample

from tests.faulty import served
from widebeam.sessions import SESSION_HEADER

SEARCH = Request("/v1/recommend", b"{}")


class Fleet:
    """Servers by number, behind a proxy that shows their start (as Ray does) or names them (as HAProxy does)."""

    def __init__(self, named: bool) -> None:
        self.named, self.dead, self.starts = named, False, [1.0, 2.0, 3.0]
        self.lost: list[str] = []

    def server(self, session: str) -> int:
        """1 is the one that dies; half of its sessions go to each of the others."""
        number = zlib.crc32(session.encode())
        home = number % 3
        return (0, 2)[number // 3 % 2] if home == 1 and self.dead else home

    async def search(self, request: web.Request) -> web.Response:
        session = request.headers.get(SESSION_HEADER, "")
        home = self.server(session)
        await asyncio.sleep(0.05 if home == 1 else 0.002)  # so that it has some when it dies
        if home == 1 and self.dead:
            self.lost.append(session)
            if len(self.lost) % 2:
                assert request.transport is not None
                request.transport.abort()
            return web.Response(status=500)
        return web.json_response({})

    async def info(self, request: web.Request) -> web.Response:
        if self.named:
            return web.Response(status=403)
        return web.json_response({"started_at": self.starts[self.server(request.headers[SESSION_HEADER])]})

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(headers={"x-served-by": f"w{self.server(request.headers[SESSION_HEADER])}"})

    def kill(self) -> None:
        self.dead = True
        asyncio.get_running_loop().call_later(0.3, self.replace)

    def replace(self) -> None:
        self.dead, self.starts[1] = False, 4.0

    def running(self) -> AbstractAsyncContextManager[str]:
        app = web.Application()
        app.router.add_post(SEARCH.path, self.search)
        app.router.add_get("/server_info", self.info)
        app.router.add_get("/ready", self.ready)
        return served(app)


@pytest.mark.parametrize("named", [False, True], ids=["by start", "by name"])
async def test_a_fleet_loses_what_its_killed_server_had(named: bool) -> None:
    fleet = Fleet(named)
    names = [f"session-{number}" for number in range(30)]
    on_it = [name for name in names if fleet.server(name) == 1]
    async with fleet.running() as url:
        found = await failover.measure(url, SEARCH, fleet.kill, replicas=3, sessions=30, settle_s=0.2, wait_s=20)
    assert found["failed"].get("500", 0) == len(fleet.lost) // 2
    assert found["unanswered"] == len(fleet.lost) - len(fleet.lost) // 2
    assert found["failed_on_killed"] == len(fleet.lost) >= 1
    assert found["failed_elsewhere"] == found["moved_elsewhere"] == found["failed_on_killed_sent_later"] == 0
    assert (found["sessions"], found["sessions_on_killed"]) == (30, len(on_it))
    assert found["moved_away_share"] == found["moved_back_share"] == len(on_it) / 30
    assert found["requests"] > 30 and found["as_many_servers_s"] >= 0.3


async def test_it_kills_nothing_where_it_could_not_tell() -> None:
    fleet = Fleet(named=False)
    async with fleet.running() as url:
        with pytest.raises(SystemExit, match="not 4 servers"):
            await failover.measure(url, SEARCH, fleet.kill, replicas=4)
        with pytest.raises(SystemExit, match="404"):
            await failover.measure(url, Request("/nowhere", b"{}"), fleet.kill, replicas=3)
    assert not fleet.dead


def sent(session: str, moment: float, ended: float, outcome: str = "ok") -> Sent:
    return Sent(session, Sample(moment, moment, ended, outcome))


BEFORE = {"a": "1", "b": "1", "c": "2", "d": "3"}


def test_seconds_count_from_the_kill_and_losses_by_server() -> None:
    """a and b were on the killed server. c moved although it was not, and b failed once more before others took it."""
    rounds = [
        Round(10.5, {"a": "2", "b": None, "c": "3", "d": "3"}),
        Round(11.0, {"a": "2", "b": "3", "c": "3", "d": "3"}),
        Round(15.0, {"a": "4", "b": "3", "c": "2", "d": "3"}),
    ]
    requests = [
        sent("a", 9.0, 9.1), sent("b", 9.9, 10.25, "ServerDisconnectedError"), sent("a", 9.8, 10.1),
        sent("b", 10.25, 10.5, "503"), sent("c", 10.0, 10.75, "500"), sent("a", 10.5, 12.0), sent("b", 10.6, 11.5),
    ]  # fmt: skip
    found = failover.losses(BEFORE, 10.0, rounds, rounds[-1].meets | {"d": "4"}, requests)
    assert found == {
        "requests": 7, "failed": {"500": 1, "503": 1, "ServerDisconnectedError": 1}, "unanswered": 1,
        "failed_on_killed": 2, "failed_on_killed_sent_later": 1, "failed_elsewhere": 1,
        "sessions": 4, "sessions_on_killed": 2, "moved_away_share": 0.75, "moved_elsewhere": 1,
        "moved_back_share": 0.75, "first_answer_s": 1.5, "last_failure_s": 0.75, "as_many_servers_s": 5.0,
    }  # fmt: skip
    assert "| s until as many servers answered" in failover.markdown(found)


def test_what_did_not_come_is_none() -> None:
    away = {"a": "2", "b": "3", "c": "2", "d": "3"}
    found = failover.losses(BEFORE, 10.0, [Round(11.0, away)], away, [sent("c", 10.0, 10.1)])
    assert found["failed"] == {} and found["moved_back_share"] == 0
    assert found["first_answer_s"] is found["last_failure_s"] is found["as_many_servers_s"] is None


@pytest.mark.parametrize("meets", [BEFORE, {"a": "2", "b": "2", "c": "2", "d": "2"}, BEFORE | {"a": None}])
def test_not_one_server_that_went_is_an_error(meets: failover.Meets) -> None:
    with pytest.raises(SystemExit, match="had gone after the kill, not one"):
        failover.losses(BEFORE, 10.0, [Round(11.0, meets)], BEFORE, [])
