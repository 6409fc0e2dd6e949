"""Requests over real HTTP, when they are sent, and what came of each: the parts of online.py. Imports no torch.

One event loop and one aiohttp session send bodies that were encoded beforehand; an answer is stamped before it is
decoded, and only its times are. In an open loop latency counts from the moment that a request was due: what waits for
anything, this process included, shows.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np
from peers import sampling_params
from report import quantile, quantiles
from yarl import URL

from widebeam.sessions import SESSION_HEADER

PATHS = {"generate": "/generate", "recommend": "/v1/recommend"}
LONGEST_PAUSE_S = 1.0
INTERVALS = 10
"""Of a level of load, whose rates tell how certain the rate of all is."""
JSON = {"Content-Type": "application/json"}


class Shape(NamedTuple):
    """What a request asks for: tokens in its prompt, beams, and tokens to generate."""

    context: int
    width: int
    tokens: int


class Request(NamedTuple):
    """A request as it is sent; without a body it is a GET."""

    path: str
    body: bytes | None = None
    session: str | None = None
    """What keeps it with one of several servers behind one address."""


class Times(msgspec.Struct, gc=False):
    """What a server says of the time of one request, in ms."""

    queue: float
    prefill: float
    decode: float
    total: float


class Sample(NamedTuple):
    """One request; moments in seconds since its level of load began."""

    due: float
    sent: float
    ended: float
    outcome: str
    """`ok`, the HTTP status, or the name of what went wrong on the way."""
    engine: Times | None = None
    handler_ms: float | None = None
    """`e2e_latency`, where the server has one."""

    @property
    def latency_ms(self) -> float:
        return (self.ended - self.due) * 1e3


def mixed_shapes(count: int, contexts: tuple[int, int], widths: tuple[int, int], tokens: int, seed: int) -> list[Shape]:
    """Contexts and widths drawn log-uniformly and independently, both ends included."""
    rng = np.random.default_rng(seed)

    def draw(low: int, high: int) -> list[int]:
        return np.exp(rng.uniform(np.log(low), np.log(high + 1), count)).astype(int).clip(low, high).tolist()

    return [Shape(context, width, tokens) for context, width in zip(draw(*contexts), draw(*widths), strict=True)]


def make_requests(shapes: Sequence[Shape], route: str, dialect: str, vocab: int, seed: int) -> list[Request]:
    """One request for each shape, its prompt random token ids below `vocab`."""
    rng = np.random.default_rng(seed)
    requests = []
    for context, width, tokens in shapes:
        body: dict[str, Any] = {"input_ids": rng.integers(0, vocab, context).tolist()}
        if route == "recommend":
            body |= {"n": width, "beam_width": width}
        else:
            body["sampling_params"] = sampling_params(dialect, width, tokens)
        requests.append(Request(PATHS[route], msgspec.json.encode(body)))
    return requests


def poisson(rate: float, seconds: float, seed: int, burst: tuple[float, float] | None = None) -> list[float]:
    """Moments of arrival in [0, seconds), `rate` a second on average.

    With `burst` (seconds on, seconds off) all of them fall into the on-phases, which are so much denser.
    """
    on, off = burst or (seconds, 0.0)
    dense = rate * (on + off) / on
    rng = np.random.default_rng(seed)
    moment = 0.0
    found: list[float] = []
    while True:
        moment += float(rng.exponential(1.0 / dense))  # in time that leaves out the off-phases
        due = moment // on * (on + off) + moment % on
        if due >= seconds:
            return found
        found.append(due)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    at_s: float
    context: int
    width: int
    tokens: int


def read_trace(path: Path) -> tuple[list[float], list[Shape]]:
    """Moments of arrival and shapes, from lines such as `{"at_s": 0.25, "context": 5000, "width": 256, "tokens": 3}`.

    The first one arrives at 0; the order of the lines does not matter.
    """
    lines = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            lines.append(msgspec.json.decode(line, type=_Line))
        except msgspec.DecodeError as error:
            raise SystemExit(f"{path}, line {number}: {error}") from None
    if not lines:
        raise SystemExit(f"{path} has no arrivals")
    lines.sort(key=lambda line: line.at_s)
    first = lines[0].at_s
    return [line.at_s - first for line in lines], [Shape(line.context, line.width, line.tokens) for line in lines]


class _Meta(msgspec.Struct):
    e2e_latency: float | None = None
    timing_ms: Times | None = None


class _Reply(msgspec.Struct):
    """The fields of an answer that are read; all others are skipped."""

    meta_info: _Meta | None = None
    timing_ms: Times | None = None


_REPLY = msgspec.json.Decoder(_Reply | list[_Reply])


class Load:
    """A client of one server or of several equal ones, and the loops that it drives. Use it in `async with`.

    Each request in flight of a closed loop stays with one server, and those of an open loop go to all in turn.
    """

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        self._servers = [URL(url) for url in urls]
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._urls: dict[tuple[int, str], URL] = {}

    async def __aenter__(self) -> Load:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # an open loop has a socket for each that waits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
            timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, read_bufsize=1 << 18,
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> bytes:
        """The body of the first server's answer; empty if there is none with status 200."""
        try:
            status, content, _ = await self.fetch(Request(path))
        except (aiohttp.ClientError, OSError):
            return b""
        return content if status == 200 else b""

    async def fetch(self, request: Request, turn: int = 0) -> tuple[int, bytes, Mapping[str, str]]:
        """Status, content and headers of the answer to one request, by the server whose turn it is."""
        path, body, session = request
        key = turn % len(self._servers), path
        url = self._urls.get(key) or self._urls.setdefault(key, self._servers[key[0]].joinpath(path.lstrip("/")))
        method, headers = ("GET", {}) if body is None else ("POST", JSON)
        if session is not None:
            headers = headers | {SESSION_HEADER: session}
        async with self._session.request(method, url, data=body, headers=headers) as response:
            return response.status, await response.read(), response.headers

    async def send(self, request: Request, turn: int, start: float, due: float | None = None) -> tuple[Sample, float]:
        """One request that was due so many seconds after `start`, or now; and how long to stay away if refused."""
        sent = time.perf_counter() - start
        due = sent if due is None else due
        try:
            status, content, headers = await self.fetch(request, turn)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            return Sample(due, sent, time.perf_counter() - start, type(error).__name__), 0.0
        ended = time.perf_counter() - start
        if status != 200:
            retry_after = headers.get("Retry-After", "")
            pause_s = min(float(retry_after), LONGEST_PAUSE_S) if retry_after.isdigit() else LONGEST_PAUSE_S
            return Sample(due, sent, ended, str(status)), pause_s if status == 429 else 0.0
        if request.body is None:
            return Sample(due, sent, ended, "ok"), 0.0
        try:
            reply = _REPLY.decode(content)
        except msgspec.DecodeError as error:
            return Sample(due, sent, ended, type(error).__name__), 0.0
        first = reply if isinstance(reply, _Reply) else reply[0] if reply else _Reply()
        meta = first.meta_info or _Meta()
        handler_ms = None if meta.e2e_latency is None else meta.e2e_latency * 1e3
        return Sample(due, sent, ended, "ok", first.timing_ms or meta.timing_ms, handler_ms), 0.0

    async def closed_loop(self, requests: Sequence[Request], concurrency: int, seconds: float) -> list[Sample]:
        """So many requests in flight at all times. Whoever is refused stays away as Retry-After says, 1 s at most."""
        samples: list[Sample] = []
        pending: Iterator[Request] = itertools.cycle(requests)
        start = time.perf_counter()

        async def worker(turn: int) -> None:
            while time.perf_counter() - start < seconds:
                sample, pause_s = await self.send(next(pending), turn, start)
                samples.append(sample)
                if pause_s:
                    await asyncio.sleep(pause_s)

        await asyncio.gather(*map(worker, range(concurrency)))
        return samples

    async def open_loop(self, requests: Sequence[Request], moments: Sequence[float]) -> list[Sample]:
        """A request at each moment, whatever has become of those before it; never early."""
        start = time.perf_counter()
        tasks = []
        for turn, (due, request) in enumerate(zip(moments, itertools.cycle(requests), strict=False)):
            await asyncio.sleep(0)
            while (wait_s := start + due - time.perf_counter()) > 0:  # noqa: ASYNC110 (nothing sets an event here)
                await asyncio.sleep(math.ceil(wait_s * 1e3) / 1e3)  # the loop's timers count in ms: less would spin
            tasks.append(asyncio.create_task(self.send(request, turn, start, due)))
        return [sample for sample, _ in await asyncio.gather(*tasks)]


def summary(samples: Sequence[Sample], first: float, last: float, limit_ms: float | None) -> dict[str, Any]:
    """One level of load. Counts and latencies are of requests that were due in [first, last); rates are of answers
    that came within it, `goodput` of those in time; `rate_error` as standard_error says."""
    due = [sample for sample in samples if first <= sample.due < last]
    good = [sample for sample in due if sample.outcome == "ok"]
    outcomes = Counter(sample.outcome for sample in due)
    came = [sample for sample in samples if sample.outcome == "ok" and first <= sample.ended < last]
    in_time = [sample for sample in came if limit_ms is None or sample.latency_ms <= limit_ms]
    ok, refused = outcomes.pop("ok", 0), outcomes.pop("429", 0)
    return {
        "seconds": last - first,
        "sent": len(due), "ok": ok, "refused": refused, "failed": dict(sorted(outcomes.items())),
        "offered_per_s": len(due) / (last - first), "requests_per_s": len(came) / (last - first),
        "rate_error": standard_error([sample.ended for sample in came], first, last),
        "goodput_per_s": len(in_time) / (last - first),
        **quantiles("latency", [sample.latency_ms for sample in good]),
        "late_p99_ms": quantile([(sample.sent - sample.due) * 1e3 for sample in due], 0.99),
        **{f"{part}_ms": quantile([getattr(s.engine, part) for s in good if s.engine], 0.5)
           for part in Times.__struct_fields__},
        "handler_ms": quantile([sample.handler_ms for sample in good if sample.handler_ms is not None], 0.5),
    }  # fmt: skip


def standard_error(moments: Sequence[float], first: float, last: float) -> float | None:
    """Of the rate at which something came in [first, last), as a share of it: by the spread of the rates in INTERVALS
    equal parts. A wave whose answers fall into one part or the next makes it larger than it is."""
    counts, _ = np.histogram(moments, INTERVALS, (first, last))
    return float(counts.std(ddof=1) / counts.mean() / math.sqrt(INTERVALS)) if len(moments) else None


def settle() -> None:
    """Collect garbage now and not while times are taken: with tens of thousands of samples that stops this process for
    up to 100 ms."""
    gc.disable()
    gc.collect()
    gc.freeze()
