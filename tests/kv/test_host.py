"""Pages that go to the host's memory and come back, case by case; any order of events: test_host_machine.py."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kv.cached_prompts import S, pages_of, tokens
from tests.kv.host_device import Device, LateCopies, Prompt
from widebeam.kv.context import ContextLease
from widebeam.kv.copies import PageCopies, runs
from widebeam.kv.prefix import Prefix

A, B = (1, 1, 2, 2, 3, 3, 0), (4, 4, 5, 5, 6, 6, 0)
"""Three pages and a token."""


def test_what_was_pushed_out_comes_back() -> None:
    device = Device()
    device.visit(*A)
    device.push_out()
    assert device.visit(*A) == 0, "nobody has looked for it"
    device.push_out()
    assert device.come(*A) == 6
    device.tier.settle()
    stats = device.cache.stats
    assert (stats.hit_tokens, stats.restored_tokens) == (6, 6) and device.come(*A) == 6
    assert device.cache.stats.restored_tokens == 6, "the second time it was on the device"
    assert device.events() == {"pages": 3, "saved": 3, "restored": 3}
    device.push_out()
    assert device.come(*A[:4], 9, 9, 0) == 4, "as far as it begins alike"


@pytest.mark.parametrize("copies", [PageCopies, LateCopies])
def test_many_come_back(copies: type[PageCopies]) -> None:
    """With few pages at either end; late copies are over at any moment, or when somebody has to wait for them."""
    restored = 0
    for seed in range(30):
        rng, held = np.random.default_rng(seed), list[ContextLease]()
        device = Device(int(rng.integers(4, 12)), int(rng.integers(4, 20)), copies=copies)
        for _ in range(100):
            prompts = [Prompt((0, int(rng.integers(5))) * int(rng.integers(1, 4)) + (0,)) for _ in range(2)]
            device.tier.prefetch(prompts[: rng.integers(3)])
            if rng.random() < 0.6 and (lease := device.acquire(prompts[0])) is not None:
                held.append(lease)
            elif held:
                device.release(held.pop(rng.integers(len(held))))
                device.tier.save()
            if isinstance(device.copies, LateCopies):
                for launched in (device.copies.saves, device.copies.restores):
                    for transfer in list(launched)[: rng.integers(3)]:
                        transfer.wait()
            device.check()
        restored += device.events().get("restored", 0)
    assert restored > 500


def test_whoever_goes_away_leaves_cached_pages() -> None:
    device = Device()
    device.visit(*A)
    device.push_out()
    device.tier.prefetch([Prompt(A)])
    assert device.tier.pages_in_flight == device.pool.pages_used == 3
    device.tier.look()
    device.check()
    assert device.pool.pages_used == 0 and device.cache.stats.idle_pages == 3
    assert device.visit(*A) == 6


def test_salts_share_nothing() -> None:
    device = Device()
    device.visit(*A, salt=b"a")
    device.push_out()
    assert [device.come(*A, salt=salt) for salt in (b"b", b"", b"a")] == [0, 0, 6]


@pytest.mark.parametrize("salt", [None, b"a", b"b"])
def test_a_flush_ends_copies_in_flight(salt: bytes | None) -> None:
    """What they write is nobody's, and their pages come back when they are over."""
    gone = salt in (None, b"a")
    for restores in (False, True):
        device = Device()
        device.visit(*A, salt=b"a")
        if restores:
            device.push_out()
            device.tier.prefetch([Prompt(A, b"a")])
        assert device.tier.pages_in_flight == (3 if restores else 2), "no more than a quarter leaves together"
        device.flush(salt)
        assert device.pool.pages_used > 0
        assert device.come(*A, salt=b"a") == (0 if gone else 6)
        device.flush()
        device.tier.settle()
        device.check()
        assert device.pool.pages_used == 0 and device.tier.stats.pages == 0
        assert device.come(*A, salt=b"a") == 0


def test_a_wave_waits_for_pages_in_flight() -> None:
    device = Device()
    device.visit(*A)
    assert device.tier.pages_in_flight and not device.events().get("waits")
    lease = device.acquire(Prompt(tuple(range(20, 20 + 8 * S))))
    assert lease is not None and len(lease.pages) == 8 and device.events()["waits"] == 1
    device.release(lease)


def test_a_restore_takes_what_nobody_needs() -> None:
    """Not what a lease holds, nor what those before it in the queue need."""
    device = Device()
    for prompt in (A, B):
        device.visit(*prompt)
    device.push_out()
    held = device.acquire(Prompt(tuple(range(20, 20 + 6 * S))))
    assert held is not None
    device.tier.prefetch([Prompt(A)])
    assert not device.tier.busy
    device.tier.restore(Prefix.of(tokens(*A), S))
    device.check()
    assert device.tier.pages_in_flight == 2, "two pages are free"
    device.release(held)
    device.tier.flush()
    device = Device(num_pages=9)
    for prompt in (A, B, A):
        device.visit(*prompt)
    device.push_out()
    waiting = [Prompt(A), Prompt(B), Prompt((*B, 1, 1, 1))]
    device.tier.prefetch(waiting)
    assert [prompt.prefetched for prompt in waiting] == [True, True, False]
    device.tier.settle()
    assert device.tier.stats.restored == 6


def test_what_a_prompt_needs_makes_no_room_for_others() -> None:
    device = Device(num_pages=9)
    device.visit(*A)
    device.push_out()
    device.visit(*B)
    assert device.visit(7, 7, 8, 8, 0) == 0
    device.tier.settle()
    device.tier.prefetch([Prompt(A), Prompt(B)])
    device.check()
    assert len(device.cache.match(Prefix.of(tokens(*B), S))) == len(device.cache.match(Prefix.of(tokens(*A), S))) == 3


def test_a_page_that_changed_is_found(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(check=True)
    for prompt in (A, B):
        device.visit(*prompt)
    device.push_out()
    for prompt in (A, B):
        second = device.tier._index.match(Prefix.of(tokens(*prompt), S))[1]
        device.copies._host[second.page - 1].view(-1)[3] += 1
    assert device.come(*A) == device.come(*B) == 2, "that before it is as it was"
    assert device.tier.stats.corrupt == 4 and len(caplog.records) == 1
    device.push_out()
    assert device.come(*A) == 6, "what was computed again was saved again"


def test_slow_restores_are_not_made() -> None:
    device = Device(rate=1000.0)
    device.visit(*A)
    device.push_out()
    seconds = device.pool.page_bytes / 1000
    device.tier.prefill_rate.note(S, seconds / 2)
    assert device.come(*A) == 0 and device.events()["declined"] == 3
    for _ in range(200):
        device.tier.prefill_rate.note(S, seconds * 2)
    device.push_out()
    assert device.come(*A) == 6 and device.events()["declined"] == 3


def test_more_waits_to_be_saved_than_there_is() -> None:
    """The oldest go; what is saved is that of the newest, in pieces of a quarter of the pages."""
    device = Device(num_pages=8, host_pages=2)
    for prompt in (A, B, A, B):
        lease = device.acquire(Prompt(prompt))
        assert lease is not None
        device.release(lease)
    assert device.events() == {"dropped": 6}
    device.tier.save()
    device.drain()
    device.check()
    assert device.events() == {"pages": 2, "saved": 4, "evicted": 2, "dropped": 6 + 2}, "a third page has no room"


def test_integrity_notices_what_is_wrong() -> None:
    def flying() -> Device:
        device = Device()
        device.visit(*A)
        return device

    device = flying()
    device.tier._flights._flights.clear()
    with pytest.raises(RuntimeError, match="by no copy"):
        device.check()
    device = flying()
    device.tier._flights._writing.clear()
    with pytest.raises(RuntimeError, match="said to be written"):
        device.check()
    device = flying()
    device.pool.release(device.tier._flights._flights[0].device)
    with pytest.raises(RuntimeError, match="of the device no more"):
        device.check()
    device = flying()
    device.tier._host._free.pop()
    with pytest.raises(RuntimeError, match="leak"):
        device.check()


def test_pages_larger_than_what_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages at a time."""
    device = Device(num_pages=40, host_pages=40)
    monkeypatch.setattr("widebeam.kv.copies.STAGED_BYTES", 2 * device.pool.page_bytes)
    device = Device(num_pages=40, host_pages=40)
    ids = tuple(np.repeat(np.arange(9), S).tolist())
    device.visit(*ids, 0)
    device.push_out()
    assert device.come(*ids, 0) == 9 * S and len(device.copies._leaving) == 2


def test_pages_that_came_together_lie_together() -> None:
    """In the host's memory, so that few copies bring them back, also where others lay before."""
    device = Device(num_pages=16, host_pages=12)
    for user in range(9):
        ids = tuple(range(user * 100, user * 100 + 3 * S + 1))
        device.visit(*ids)
        device.tier.settle()
    saved = device.tier._index.match(Prefix.of(tokens(*ids), S))
    assert len(saved) == len(pages_of(b"", ids)) - 1 == 3 and list(runs([page.page for page in saved])) == [(0, 3)]
