"""The host tier over HTTP: what came back is told as cached, and the numbers add up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.service import Service, running_service, wait_until
from tests.http.test_metrics import Growth
from tests.http.test_prefix_cache import CACHED, GENERATE, IDS, PAGE, RECOMMEND, SETTINGS, ask, told
from widebeam.engine.request import SearchParams

TOKENS = 160


@pytest.fixture(scope="module")
def shared_tiered(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    small = {"max_total_tokens": TOKENS, "max_wave_tokens": 128, "prefix_cache_host_gib": 0.01}
    with running_service(checkpoint, catalog_file, **(SETTINGS | small)) as service:
        tier = service.engine._runtime.core.tier
        assert tier is not None
        tier._copies.bytes_per_s = math.inf  # restores always pay
        yield service


@pytest.fixture
def tiered(shared_tiered: Service) -> Iterator[Service]:
    """With little room on the device, more in the host's memory, and nothing in either."""
    shared_tiered.thread.run(shared_tiered.engine.flush_prefixes())
    yield shared_tiered
    shared_tiered.check()


def saved(service: Service) -> None:
    """What was computed has reached the host."""
    wait_until(lambda: not service.engine._runtime.prefixes.moves_pages)


def push_out(service: Service) -> None:
    saved(service)
    for first in (30, 31):
        ask(service, RECOMMEND, [first] * 100)
    saved(service)


def test_what_came_back_is_told_as_cached(tiered: Service) -> None:
    grown = Growth(tiered)
    cold = ask(tiered, GENERATE, IDS)
    push_out(tiered)
    warm = ask(tiered, GENERATE, IDS)
    assert (told(cold), told(warm)) == (0, CACHED) and cold["output_ids"] == warm["output_ids"]
    saved(tiered)
    grown.look()
    pages = CACHED // PAGE
    events = grown.by("prefix_host_events_total")
    assert events == {"saved": pages + 2 * 24, "restored": pages}
    assert grown.of("prefix_hit_tokens_total") == grown.of("prefix_restored_tokens_total") == CACHED
    assert grown.after["widebeam_prefix_host_pages", ()] == events["saved"]
    size = grown.after["widebeam_prefix_host_bytes", ()] / events["saved"]
    copied = grown.by("prefix_transfer_bytes_total")
    assert copied == {"to_host": events["saved"] * size, "to_device": pages * size}
    assert grown.after["widebeam_prefix_host_limit_bytes", ()] <= 0.01 * 2**30
    assert grown.after["widebeam_prefix_prefill_tokens_per_second", ()] > 0


def test_a_flush_reaches_the_host(tiered: Service) -> None:
    ask(tiered, RECOMMEND, IDS)
    push_out(tiered)
    assert tiered.post("/flush_cache", None).status == 200
    assert tiered.engine.stats().prefix_host_pages == 0
    assert told(ask(tiered, RECOMMEND, IDS)) == 0


def test_salts_share_nothing(tiered: Service) -> None:
    ask(tiered, RECOMMEND, IDS, cache_salt="a")
    push_out(tiered)
    assert [told(ask(tiered, RECOMMEND, IDS, **salt)) for salt in ({}, {"cache_salt": "b"})] == [0, 0]
    push_out(tiered)
    assert told(ask(tiered, RECOMMEND, IDS, cache_salt="a")) == CACHED


def test_a_request_that_goes_away_leaves_what_it_brought(tiered: Service) -> None:
    """Cancelled after its pages were looked for."""
    ask(tiered, GENERATE, IDS)
    push_out(tiered)
    engine = tiered.engine

    async def cancelled() -> None:
        search = asyncio.ensure_future(engine.submit(IDS, SearchParams(n=1, beam_width=8)))
        await asyncio.sleep(0)
        search.cancel()
        await asyncio.gather(search, return_exceptions=True)

    restored = engine.stats().prefix_host_events["restored"]
    with tiered.held():
        tiered.thread.run(cancelled())
    wait_until(lambda: engine.stats().jobs_dropped > 0)
    saved(tiered)
    tiered.thread.run(engine.check_integrity())
    assert engine.stats().prefix_host_events["restored"] == restored, "who is gone when looked at costs nothing"
    assert told(ask(tiered, GENERATE, IDS)) == CACHED
