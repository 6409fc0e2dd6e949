"""A chaos run over prompts that begin alike, with a prefix cache that is too small for them and a host tier behind it,
flushed in between: every answer is that of a quiet server without them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests import tiny
from tests.http.cases import VOCABULARY, Case, random_cases, rankings, same
from tests.http.chaos import Faults, Ledger, meanwhile
from tests.http.service import Service, running_service, until
from tests.http.test_chaos import SETTINGS, ask, check_counters, everybody, is_unharmed, on_loop
from tests.http.test_prefix_cache import PREFILL, told
from widebeam.engine.request import SearchParams, SearchResult
from widebeam.errors import RequestError

REQUESTS, PAGE, POOL = 240, 8, 1024
ITEMS = [f"item-{index}" for index in range(60)]


@pytest.fixture(scope="module")
def catalogs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    items = tiny.save_catalog(tmp_path_factory.mktemp("items") / "items.jsonl", seed=1)
    other = tiny.save_catalog(tmp_path_factory.mktemp("other") / "other.jsonl", seed=3, num_items=200, first_codes=12)
    return str(items), str(other)


@pytest.fixture(scope="module")
def quiet(checkpoint: Path, catalogs: tuple[str, str]) -> Iterator[Service]:
    with running_service(checkpoint, catalogs, **SETTINGS) as service:
        yield service


@pytest.fixture(scope="module")
def busy(checkpoint: Path, catalogs: tuple[str, str]) -> Iterator[Service]:
    cache = {"prefix_cache": "on", "page_size": PAGE, "max_total_tokens": POOL}
    host = {"prefix_cache_host_gib": 0.01, "check_host_pages": True}
    with running_service(checkpoint, catalogs, **SETTINGS, **cache, **host) as service:
        tier = service.engine._runtime.core.tier
        assert tier is not None
        tier._copies.bytes_per_s = math.inf  # restores always pay
        yield service


class Users:
    """A few users with long prompts and histories of their own, of which each visit sends the beginning, and more."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._prompts = [rng.integers(0, VOCABULARY, 150).tolist() for _ in range(10)]
        self._histories = [rng.permutation(ITEMS).tolist() for _ in range(10)]

    def prompt(self) -> list[int]:
        rng, user = self._rng, self._user()
        tail: list[int] = rng.integers(0, VOCABULARY, int(rng.integers(1, 10))).tolist()
        return [*self._prompts[user][: int(rng.integers(30, 150))], *tail]

    def history(self) -> list[str]:
        return self._histories[self._user()][: int(self._rng.integers(1, 20))]

    def _user(self) -> int:
        return int(10 * self._rng.random() ** 3)  # some come often

    def visit(self, case: Case) -> None:
        """Put a prompt of theirs in the place of the case's own."""
        body, rng = case.body, self._rng
        if case.fate == "flood":
            return
        if case.searches > 1:
            body["input_ids"] = [self.prompt() for _ in range(case.searches)]
        elif "history" in body:
            body["history"] = self.history()
        elif body.pop("messages", None) or body.pop("prompt", None) or "input_ids" in body:
            body["input_ids"] = self.prompt()
        salt = str(rng.choice(["", "", "", "a", "b", f"of {case.name} alone"]))
        if salt:
            body["cache_salt"] = salt


async def test_shared_prefixes_harm_nobody(busy: Service, quiet: Service, catalogs: tuple[str, str]) -> None:
    engine, rng = busy.engine, np.random.default_rng(5)
    users = Users(rng)
    cases = random_cases(seed=11, count=REQUESTS, items=ITEMS, limit=SETTINGS["max_waiting_requests"])
    for case in cases:
        users.visit(case)

    restored = 0

    async def flush() -> None:
        """Whenever some pages have come back from the host since the last flush."""
        nonlocal restored
        now = engine.stats().prefix_host_events["restored"]
        if now >= restored + 20:
            restored = now
            assert (await asyncio.to_thread(busy.post, "/flush_cache", None)).status == 200

    async def prefill() -> None:
        body = {"input_ids": users.prompt(), "catalog": "other", "ttl_s": float(rng.uniform(0.01, 2))}
        assert (await asyncio.to_thread(busy.post, PREFILL, body)).status in (200, 429, 500, 503)

    async def cancel() -> None:
        params = SearchParams(beam_width=8, max_new_tokens=20, catalog="none", ignore_eos=True)
        search = on_loop(busy, engine.submit(users.prompt(), params))
        await asyncio.sleep(float(rng.uniform(0, 0.05)))
        search.cancel()
        (outcome,) = await asyncio.gather(search, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError | RequestError | SearchResult)

    async def reload() -> None:
        """The same file: a version of its own, with the same answers."""
        await on_loop(busy, engine.load_catalog(catalogs[0], "items"))

    async def look() -> None:
        await on_loop(busy, engine.check_integrity())

    def met() -> bool:
        """Whether all has happened that the run is for: it goes on until then."""
        stats = engine.stats()
        happened = stats.prefix_evicted_pages, stats.prefix_flushed_pages, stats.prefix_host_events["restored"]
        return faults.of_each_kind and all(happened) and min(stats.prefix_searches.values()) > REQUESTS / 12

    with Ledger().kept(engine) as ledger, Faults(every=9).injected(engine) as faults:
        async with meanwhile(flush, prefill, cancel, reload, look):
            answers = await everybody(busy, cases)
            await until(met, seconds=60)
        await until(lambda: not engine._waiting and ledger.settled)
    await asyncio.to_thread(busy.check)
    check_counters(busy, cases, answers, ledger, faults)

    unharmed = [case for case in cases if is_unharmed(case, answers.get(case.name), faults)]
    assert len(unharmed) > REQUESTS / 3
    assert not engine.stats().prefix_host_events["corrupt"]
    check_cached_tokens(unharmed, {case.name: answers[case.name].json for case in unharmed})
    await compare(quiet, unharmed, {case.name: answers[case.name].json for case in unharmed})

    await on_loop(busy, engine.flush_prefixes())
    await until(lambda: not engine._runtime.prefixes.moves_pages)
    context = engine._runtime.core.context
    assert (
        engine.stats().prefix_cached_pages == engine.stats().prefix_host_pages == 0
        and len(context._free) == context.num_pages == POOL // PAGE
    )


def check_cached_tokens(cases: list[Case], found: dict[str, Any]) -> None:
    """Whole pages, never all of a prompt; nothing for whom nobody shares a salt with."""
    some = 0
    for case in cases:
        for answer in found[case.name] if case.searches > 1 else [found[case.name]]:
            counts = answer.get("meta_info") or answer["usage"]
            assert told(answer) % PAGE == 0 and told(answer) < counts["prompt_tokens"]
            if case.searches == 1 and case.body.get("cache_salt") == f"of {case.name} alone":
                assert told(answer) == 0
            some += told(answer) > 0
    assert some > len(cases) / 12


async def compare(quiet: Service, cases: list[Case], found: dict[str, Any]) -> None:
    """Each answer equals that to the same request on a server without a cache."""
    different: list[Case] = []
    gate = asyncio.Semaphore(4)

    async def one(session: aiohttp.ClientSession, case: Case) -> None:
        async with gate:
            wanted = await ask(session, case, case.name)
        assert wanted.status == 200
        if not same(rankings(case, found[case.name]), rankings(case, wanted.json)):
            different.append(case)

    async with aiohttp.ClientSession(quiet.url) as session:
        await asyncio.gather(*(one(session, case) for case in cases))
    assert not different
    await asyncio.to_thread(quiet.check)
