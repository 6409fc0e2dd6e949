"""A chaos run: whatever clients, deadlines, catalogs and the device do, each request has one outcome and no other is
harmed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import tiny
from tests.http.cases import ROUTES, VOCABULARY, Case, random_cases, rankings, same
from tests.http.chaos import Faults, Ledger, leave, meanwhile
from tests.http.service import Service, running_service, until
from widebeam.engine.request import SearchParams
from widebeam.errors import CatalogError, EngineError, OutOfMemory, Overloaded

REQUESTS, AT_ONCE = 300, 28
OUTCOMES = {
    200: "ok", 400: "invalid_request", 404: "not_found", 429: "overloaded", 499: "aborted", 500: "engine_error",
    503: "out_of_memory", 504: "deadline_exceeded",
}  # fmt: skip
EXPLAINED: dict[str, set[int]] = {"stays": set(), "aborted": {499}, "late": {504}}
"""What may become of a request, beside what may become of any."""
SETTINGS: dict[str, Any] = {
    "max_wave_requests": 4,
    "max_wave_rows": 256,
    "max_beam_width": 128,
    "beam_kv_tokens": 4096,
    "max_waiting_requests": 64,
}


@dataclass
class Answer:
    status: int
    headers: Any
    json: Any


@dataclass
class Catalogs:
    """Files that are loaded under one name in turn, and which file each version was."""

    files: list[Path]
    broken: Path
    loaded: dict[int, Path] = field(default_factory=dict)

    def next_file(self) -> Path:
        return self.files[len(self.loaded) % len(self.files)]


@pytest.fixture(scope="module")
def catalogs(tmp_path_factory: pytest.TempPathFactory) -> Catalogs:
    """Two files with the same items under other SIDs, and one that cannot be read."""
    files = [tiny.save_catalog(tmp_path_factory.mktemp("v") / "items.jsonl", seed=seed) for seed in (1, 2)]
    broken = tmp_path_factory.mktemp("v") / "items.jsonl"
    broken.write_text(files[0].read_text() + '{"item_id": "half a line", "si')
    return Catalogs(files, broken)


@pytest.fixture(scope="module")
def service(checkpoint: Path, catalogs: Catalogs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    other = tiny.save_catalog(tmp_path_factory.mktemp("other") / "other.jsonl", seed=3, num_items=200, first_codes=12)
    with running_service(checkpoint, other, **SETTINGS) as service:
        yield service


def on_loop(service: Service, coro: Any) -> asyncio.Future[Any]:
    """Run it on the engine's own loop, and wait for it on this one."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coro, service.thread._loop))


async def test_whatever_happens_each_request_has_one_outcome(service: Service, catalogs: Catalogs) -> None:
    engine = service.engine
    unhandled: list[dict[str, Any]] = []
    service.thread._loop.set_exception_handler(lambda _, context: unhandled.append(context))
    rng = random.Random(0)

    async def reload() -> None:
        version = await on_loop(service, engine.load_catalog(catalogs.next_file(), "items"))
        catalogs.loaded[version.version] = catalogs.next_file()
        with pytest.raises(CatalogError):
            await on_loop(service, engine.load_catalog(catalogs.broken, "items"))

    async def stall() -> None:
        await asyncio.wrap_future(engine._worker.call(lambda _: time.sleep(0.02)))

    async def search_and_cancel() -> None:
        width, levels = rng.randint(1, 64), rng.randint(1, 30)
        params = SearchParams(beam_width=width, max_new_tokens=levels, catalog="none", ignore_eos=True)
        search = on_loop(service, engine.submit([rng.randrange(VOCABULARY)] * rng.randint(1, 100), params))
        await asyncio.sleep(rng.uniform(0, 0.05))
        search.cancel()
        with contextlib.suppress(asyncio.CancelledError, OutOfMemory, EngineError, Overloaded):
            await search

    async def scrape() -> None:
        for path in ("/metrics", "/health"):
            assert (await asyncio.to_thread(service.get, path)).status == 200

    await reload()
    items = [f"item-{index}" for index in range(60)]
    cases = random_cases(seed=7, count=REQUESTS, items=items, limit=SETTINGS["max_waiting_requests"])
    with Ledger().kept(engine) as ledger, Faults(every=6).injected(engine) as faults:
        async with meanwhile(reload, stall, search_and_cancel, scrape):
            answers = await everybody(service, cases)
            await until(lambda: faults.of_each_kind, seconds=60)
        await until(lambda: not engine._waiting and ledger.settled)
    await asyncio.to_thread(service.check)
    assert not unhandled

    unharmed = [case for case in cases if is_unharmed(case, answers.get(case.name), faults)]
    assert len(unharmed) > REQUESTS / 5
    check_counters(service, cases, answers, ledger, faults)
    await check_answers(service, catalogs, unharmed, answers, ledger)


async def everybody(service: Service, cases: list[Case]) -> dict[str, Answer]:
    """Send all cases, AT_ONCE at a time; the answers by name. Who leaves has none."""
    gate = asyncio.Semaphore(AT_ONCE)
    answers: dict[str, Answer] = {}

    async def one(session: aiohttp.ClientSession, case: Case, rng: np.random.Generator) -> None:
        if case.fate == "leaves":
            await leave(service.address, case, rng)
            return
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(ask(session, case, case.name))
            if case.fate == "aborted":
                group.create_task(abort(session, case, float(rng.uniform(0, 0.1))))
        answers[case.name] = asked.result()

    async def in_turn(session: aiohttp.ClientSession, case: Case, seed: int) -> None:
        async with gate:
            await one(session, case, np.random.default_rng(seed))

    async with aiohttp.ClientSession(service.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(in_turn(session, case, seed) for seed, case in enumerate(cases)))
    return answers


async def ask(session: aiohttp.ClientSession, case: Case, name: str) -> Answer:
    async with session.post(case.route, json=case.named(name)) as response:
        if response.status == 200:
            assert response.headers["x-request-id"] == name
        if response.content_type == "text/event-stream":
            return streamed(await response.read(), case)
        return Answer(response.status, response.headers, await response.json())


def streamed(content: bytes, case: Case) -> Answer:
    """What a stream comes to: the answers that it ends with, or the error."""
    *lines, done, rest = content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    if "error" in events[-1]:
        error = events[-1]["error"]
        return Answer(events[-1]["code"], {"Retry-After": math.ceil(error.get("retry_after_s", 0))}, events[-1])
    last = events[-case.searches :]
    assert all(event["meta_info"]["finish_reason"] for event in last)
    return Answer(200, {}, last if case.searches > 1 else last[0])


async def abort(session: aiohttp.ClientSession, case: Case, delay: float) -> None:
    await asyncio.sleep(delay)
    async with session.post("/abort_request", json={"rid": case.name}) as response:
        assert response.status == 200
        assert 0 <= (await response.json())["aborted"] <= case.searches


def is_unharmed(case: Case, answer: Answer | None, faults: Faults) -> bool:
    """Whether nothing touched the case; raises if its answer is not one that its fate explains."""
    if answer is None:
        assert case.fate == "leaves"
        return False
    if answer.status in (429, 503):
        assert int(answer.headers["Retry-After"]) >= 1
    if case.refusal:
        assert answer.status == case.refusal
        return False
    ids = set(case.search_ids)
    explained = {429, *EXPLAINED[case.fate]}
    explained |= {503} if ids & faults.out_of_memory else set()
    explained |= {500} if ids & faults.failed else set()
    if not ids & (faults.out_of_memory | faults.failed):
        explained.add(200)
    assert answer.status in explained, (case, answer.status, answer.json)
    return answer.status == 200 and case.fate == "stays"


def check_counters(
    service: Service, cases: list[Case], answers: dict[str, Answer], ledger: Ledger, faults: Faults
) -> None:
    """What the server counted is what was sent; only of those who left it alone knows the outcome."""
    text = service.get("/metrics").content.decode()
    counted: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "widebeam_requests_total" and sample.labels["route"] in ROUTES:
                counted[sample.labels["route"], sample.labels["outcome"]] += int(sample.value)
    told = Counter((case.route, OUTCOMES[answers[case.name].status]) for case in cases if case.name in answers)
    assert counted >= told
    left = counted - told
    assert {outcome for _, outcome in left} <= {"cancelled", *OUTCOMES.values()}
    assert sum(number for (_, outcome), number in left.items() if outcome == "cancelled") > 0
    for route in ROUTES:
        sent = sum(case.route == route for case in cases)
        assert sum(number for (place, _), number in counted.items() if place == route) == sent

    assert set(ledger.outcomes) == set(ledger.jobs) and set(ledger.outcomes.values()) == {1}
    stats = service.engine.stats()
    # whoever leaves while its filters are found never comes to the device's side
    early = sum(case.searches for case in cases if "filters" in case.body and case.fate != "stays")
    assert 0 <= sum(stats.searches.values()) - len(ledger.jobs) <= early
    assert stats.out_of_memory == faults.waves["memory"]


async def check_answers(
    service: Service, catalogs: Catalogs, cases: list[Case], answers: dict[str, Answer], ledger: Ledger
) -> None:
    """Each answer equals that of the quiet engine to the same request alone, on the catalog that it ran on."""
    versions = {case.name: ledger.results[case.search_ids[0]].catalog_version for case in cases}
    different: list[Case] = []
    gate = asyncio.Semaphore(4)

    async def compare(case: Case, sids: dict[str, Any]) -> None:
        found = answers[case.name].json
        async with gate:
            quiet = await ask(session, case, f"quiet-{case.name}")
        assert quiet.status == 200
        if not same(rankings(case, found), rankings(case, quiet.json)):
            different.append(case)
        if "filters" in case.body:
            (how, some), ids = next(iter(case.body["filters"].items())), {item["id"] for item in found["items"]}
            assert ids <= set(some) if how == "allow" else not ids & set(some)
        if case.route == "/v1/recommend" and case.body["catalog"] == "items":
            assert found["catalog"]["version"] == versions[case.name]
            assert all(item["sid"] == sids[item["id"]] for item in found["items"])

    async with aiohttp.ClientSession(service.url) as session:
        for file in catalogs.files:
            await on_loop(service, service.engine.load_catalog(file, "items"))
            sids = {row["item_id"]: row["sid"] for row in map(json.loads, file.read_text().splitlines())}
            changed = [case for case in cases if case.body["catalog"] == "items"]
            ran_on_it = [case for case in changed if catalogs.loaded[versions[case.name] or 0] == file]
            await asyncio.gather(*(compare(case, sids) for case in ran_on_it))
        await asyncio.gather(*(compare(case, {}) for case in cases if case.body["catalog"] != "items"))
    assert not different
