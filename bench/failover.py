"""What the users of several servers behind one address lose when one of these is killed: Ray Serve, or HAProxy.

    python bench/failover.py --url http://127.0.0.1:8000 --replicas 3 --kill PID [--save FILE.json]

It asks each of --sessions which server it meets. Then a closed loop of --concurrency sends small requests, each of the
session whose turn it is, and after --settle seconds the process PID gets a SIGKILL. From then on all sessions are asked
again and again, until each is answered and by as many servers as before, or for --wait seconds. Nothing is started
here: Ray replaces a replica by itself, a server behind HAProxy needs somebody who does. --settle seconds later the load
ends, and the sessions are asked once more.

A server's name is its `started_at` in /server_info or, where a proxy does not offer that, what the proxy calls it
(`x-served-by`). `away` is the first time after the kill that all sessions were answered. The killed server is the one
that was gone then. A request was on it if its session had met it before.
Exit status 1 if a request failed that was not on it, or if it was not replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from loadgen import PATHS, Load, Request, Sample
from report import header, save, table

ASKED_AT_ONCE = 8
Meets = dict[str, str | None]
"""The server that each session meets; None: it got no answer."""


class Sent(NamedTuple):
    """A request of the load."""

    session: str
    sample: Sample


class Round(NamedTuple):
    """All sessions asked once, and when that was over, in seconds since the load began."""

    ended: float
    meets: Meets

    def servers(self) -> int:
        """How many answered; 0 unless every session was answered."""
        return 0 if None in self.meets.values() else len(set(self.meets.values()))


async def server_of(load: Load, session: str) -> str | None:
    try:
        status, content, _ = await load.fetch(Request("/server_info", session=session))
        if status == 200:
            return str(json.loads(content)["started_at"])
        status, _, headers = await load.fetch(Request("/ready", session=session))
    except (aiohttp.ClientError, OSError):
        return None
    return headers.get("x-served-by") if status == 200 else None


async def meet(load: Load, sessions: Sequence[str]) -> Meets:
    """Which server each session meets now."""
    pending, found = iter(sessions), dict[str, str | None].fromkeys(sessions)

    async def ask() -> None:
        for session in pending:
            found[session] = await server_of(load, session)

    await asyncio.gather(*(ask() for _ in range(ASKED_AT_ONCE)))
    return found


async def measure(
    url: str, request: Request, kill: Callable[[], object], *, replicas: int, sessions: int = 300, concurrency: int = 6,
    settle_s: float = 3.0, wait_s: float = 120.0,
) -> dict[str, Any]:  # fmt: skip
    """Call `kill` while the request is sent for all sessions in turn; what `losses` makes of it.

    SystemExit if not so many servers answer beforehand, or if none of them was gone when the sessions were asked."""
    names = [f"session-{number}" for number in range(sessions)]
    sent: list[Sent] = []
    pending, over = itertools.cycle(names), asyncio.Event()
    async with Load([url], timeout_s=wait_s) as load:
        status, content, _ = await load.fetch(request)
        if status != 200:
            raise SystemExit(f"the request fails before anything is killed: {status}: {content[:500]!r}")
        before = Round(0.0, await meet(load, names))
        if before.servers() != replicas:
            raise SystemExit(f"{sessions} sessions meet {Counter(before.meets.values())}, not {replicas} servers")
        start = time.perf_counter()

        async def client() -> None:
            while not over.is_set():
                session = next(pending)
                sample, pause_s = await load.send(request._replace(session=session), 0, start)
                sent.append(Sent(session, sample))
                await asyncio.sleep(pause_s)

        clients = asyncio.gather(*(client() for _ in range(concurrency)))
        await asyncio.sleep(settle_s)
        kill()
        killed_s = time.perf_counter() - start
        rounds: list[Round] = []
        while time.perf_counter() - start < killed_s + wait_s:
            meets = await meet(load, names)
            rounds.append(Round(time.perf_counter() - start, meets))
            if rounds[-1].servers() == replicas:
                break
        await asyncio.sleep(settle_s)
        over.set()
        await clients
        return losses(before.meets, killed_s, rounds, await meet(load, names), sent)


def losses(
    before: Meets, killed_s: float, rounds: Sequence[Round], after: Meets, sent: Sequence[Sent]
) -> dict[str, Any]:
    """Who lost what. Seconds count from the kill; None: that did not come, or there was none. SystemExit: see above."""
    away = next((round.meets for round in rounds if round.servers()), None)
    gone = set(before.values()) - set(away.values()) if away else set()
    if away is None or len(gone) != 1:
        raise SystemExit(f"of {len(set(before.values()))} servers {len(gone)} had gone after the kill, not one")
    on_it = {session for session in before if before[session] in gone}
    failed = [one for one in sent if one.sample.outcome != "ok"]
    of_killed = [one for one in failed if one.session in on_it]
    later = [one.sample for one in sent if one.sample.sent >= killed_s and one.session in on_it]
    back_s = next((round.ended for round in rounds if round.servers() == len(set(before.values()))), None)

    def seconds(moments: list[float]) -> float | None:
        return moments[0] - killed_s if moments else None

    return {
        "requests": len(sent), "failed": dict(sorted(Counter(one.sample.outcome for one in failed).items())),
        "unanswered": sum(not one.sample.outcome.isdigit() for one in failed),
        "failed_on_killed": len(of_killed),
        "failed_on_killed_sent_later": sum(one.sample.sent >= killed_s for one in of_killed),
        "failed_elsewhere": len(failed) - len(of_killed),
        "sessions": len(before), "sessions_on_killed": len(on_it),
        "moved_away_share": sum(before[session] != away[session] for session in before) / len(before),
        "moved_elsewhere": sum(before[session] != away[session] for session in before.keys() - on_it),
        "moved_back_share": sum(away[session] != after[session] for session in before) / len(before),
        "first_answer_s": seconds(sorted(sample.ended for sample in later if sample.outcome == "ok")),
        "last_failure_s": seconds(sorted((one.sample.ended for one in failed), reverse=True)),
        "as_many_servers_s": None if back_s is None else back_s - killed_s,
    }  # fmt: skip


ROWS = {
    "requests": "requests", "unanswered": "without an answer", "failed_on_killed": "failed, on the killed server",
    "failed_on_killed_sent_later": "of these sent after the kill", "failed_elsewhere": "failed, on others",
    "sessions": "sessions", "sessions_on_killed": "on the killed server",
    "moved_away_share": "share that moved when it went", "moved_elsewhere": "moved, of other servers",
    "moved_back_share": "share that moved when as many were there again",
    "first_answer_s": "s to the first answer to one of its sessions", "last_failure_s": "s to the last failure",
    "as_many_servers_s": "s until as many servers answered",
}  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    rows = [[name, report[key]] for key, name in ROWS.items()]
    rows[1:1] = [[f"failed: {outcome}", count] for outcome, count in report["failed"].items()]
    return table(["", "value"], rows)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the proxy")
    parser.add_argument("--replicas", type=int, required=True, help="servers that the sessions must meet at first")
    parser.add_argument("--kill", type=int, required=True, metavar="PID", help="process of one of them")
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--settle", type=float, default=3.0, metavar="S")
    parser.add_argument("--wait", type=float, default=120.0, metavar="S")
    parser.add_argument("--route", choices=PATHS, default="recommend")
    parser.add_argument("--body", default='{"input_ids": [5, 6, 7], "n": 3}', metavar="JSON")
    parser.add_argument("--save", type=Path, help="JSON file; its table goes beside it, as .md")
    return parser


def main(argv: list[str]) -> int:
    arguments = options().parse_args(argv)
    found = asyncio.run(
        measure(
            arguments.url, Request(PATHS[arguments.route], arguments.body.encode()),
            lambda: os.kill(arguments.kill, signal.SIGKILL), replicas=arguments.replicas, sessions=arguments.sessions,
            concurrency=arguments.concurrency, settle_s=arguments.settle, wait_s=arguments.wait,
        )
    )  # fmt: skip
    report = header(arguments) | {"cores": os.cpu_count()} | found
    print(markdown(report))
    save(arguments.save, report, markdown(report))
    return int(found["failed_elsewhere"] > 0 or found["as_many_servers_s"] is None)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
