"""Pages that go to the host's memory and come back: what a lease is given is what its own tokens left, whatever happens
in between, and nothing is lost.

What prefill would write is a number made of the salt and the tokens up to the end of a page, in every element.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kv.test_prefix import PROMPT, S, pages_of, tokens
from tests.model.test_attention import CONFIG
from widebeam.kv.context import ContextKV, ContextLease
from widebeam.kv.copies import PageCopies, Transfer, runs
from widebeam.kv.host import HostTier
from widebeam.kv.prefix import Prefix
from widebeam.kv.prefix_cache import PrefixCache

CPU = torch.device("cpu")
Ids = tuple[int, ...]


@dataclass
class Prompt:
    """As a search that waits."""

    ids: Ids
    salt: bytes = b""
    prefetched: bool = False
    prefix: Prefix | None = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = Prefix.of(tokens(*self.ids), S, self.salt)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def contents(self) -> list[float]:
        """Of its pages."""
        return [float(zlib.crc32(repr(beginning).encode()) % (1 << 24)) for beginning in pages_of(self.salt, self.ids)]


class LateTransfer(Transfer):
    """One that is made when it is waited for, or before: in turn with others of its way."""

    def __init__(self, launched: deque[LateTransfer], num_bytes: int, make: Callable[[], object]) -> None:
        super().__init__(num_bytes, None)
        self._launched, self._make = launched, make
        launched.append(self)

    @property
    def done(self) -> bool:
        return self not in self._launched

    def wait(self) -> None:
        while not self.done:
            self._launched.popleft()._make()

    precede = wait


class LateCopies(PageCopies):
    """As on the streams of a GPU, where copies are over some time after they were launched."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.saves, self.restores = deque[LateTransfer](), deque[LateTransfer]()

    def save(self, pools: Any, pages: list[int], places: list[int]) -> Transfer:
        make = partial(super().save, pools, pages, places)
        return LateTransfer(self.saves, len(pages) * self.page_bytes, make)

    def restore(self, pools: Any, pages: list[int], places: list[int], after: Any) -> Transfer:
        make = partial(super().restore, pools, pages, places, after)
        return LateTransfer(self.restores, len(pages) * self.page_bytes, make)


class Device:
    """A pool with a host tier, used as waves use it."""

    def __init__(
        self,
        num_pages: int = 8,
        host_pages: int = 12,
        check: bool = False,
        rate: float = math.inf,
        copies: type[PageCopies] = PageCopies,
    ) -> None:
        self.cache = PrefixCache(S)
        self.pool = ContextKV(CONFIG, num_pages, S, torch.float32, CPU, self.cache)
        layer_bytes = self.pool.page_bytes // (2 * CONFIG.num_layers)
        self.copies = copies(CONFIG.num_layers, layer_bytes, host_pages, CPU, check)
        self.copies.bytes_per_s = rate
        self.tier = HostTier(self.pool, self.copies)

    def check(self) -> None:
        self.pool.check_integrity()
        self.tier.check_integrity()

    def acquire(self, prompt: Prompt) -> ContextLease | None:
        wanted = [(prompt.num_tokens, prompt.prefix)]
        leases = self.pool.acquire_together(wanted)
        if leases is None:
            self.tier.make_room()
            leases = self.pool.acquire_together(wanted)
        if leases is None:
            return None
        self.tier.begin_wave(leases)
        cached = leases[0].num_cached // S
        assert [self.content(page) for page in leases[0].pages[:cached]] == prompt.contents[:cached]
        for page, content in list(zip(leases[0].pages, prompt.contents, strict=True))[cached:]:
            for pool in self.pool.pools:
                pool[:, page * S : (page + 1) * S] = content
        return leases[0]

    def content(self, page: int) -> float:
        found = torch.stack([pool[:, page * S : (page + 1) * S] for pool in self.pool.pools]).unique()
        assert len(found) == 1
        return float(found)

    def release(self, lease: ContextLease) -> None:
        prefix = lease.prefix
        self.tier.end_wave([lease])
        self.pool.release(lease, keep=True)
        if prefix is not None:
            self.tier.offer(prefix)

    def visit(self, *ids: int, salt: bytes = b"") -> int:
        """Search once, and start to save; the tokens that were cached."""
        lease = self.acquire(Prompt(ids, salt))
        assert lease is not None
        self.release(lease)
        self.tier.save()
        self.check()
        return lease.num_cached

    def come(self, *ids: int, salt: bytes = b"") -> int:
        """The same for a request that has waited."""
        self.tier.prefetch([Prompt(ids, salt)])
        self.check()
        return self.visit(*ids, salt=salt)

    def drain(self) -> None:
        """Until all is saved that waits to be."""
        while self.tier.busy:
            self.tier.settle()
            self.tier.save()

    def push_out(self) -> None:
        """Others need all the room of the device, when all is saved."""
        self.drain()
        lease = self.pool.acquire(self.pool.num_pages * S)
        assert lease is not None and not len(self.cache)
        self.pool.release(lease)

    def flush(self, salt: bytes | None = None) -> None:
        self.pool.flush(salt)
        self.tier.flush(salt)
        self.check()

    def events(self) -> dict[str, Any]:
        stats = self.tier.stats._asdict()
        names = ("pages", "saved", "dropped", "restored", "declined", "evicted", "corrupt", "failed", "waits")
        return {name: stats[name] for name in names if stats[name]}


class HostMachine(RuleBasedStateMachine):
    """Few pages at either end, and prompts of few tokens, so that many begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[ContextLease, Prompt]] = []

    @initialize(num_pages=st.integers(4, 9), host_pages=st.integers(1, 14), check=st.booleans())
    def start(self, num_pages: int, host_pages: int, check: bool) -> None:
        self.device = Device(num_pages, host_pages, check)

    @rule(prompt=PROMPT)
    def acquire(self, prompt: tuple[bytes, Ids]) -> None:
        salt, ids = prompt
        lease = self.device.acquire(Prompt(ids, salt))
        held = sum(len(other.pages) for other, _ in self.held)
        assert lease is not None or held + -(-len(ids) // S) > self.device.pool.num_pages
        if lease is not None:
            self.held.append((lease, Prompt(ids, salt)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.device.release(lease)

    @rule(prompts=st.lists(PROMPT, min_size=1, max_size=5), prefetch=st.booleans())
    def visits(self, prompts: list[tuple[bytes, Ids]], prefetch: bool) -> None:
        """Some requests that wait together, and then run one after the other."""
        waiting = [Prompt(ids, salt) for salt, ids in prompts]
        if prefetch:
            self.device.tier.prefetch(waiting)
        for prompt in waiting:
            if (lease := self.device.acquire(prompt)) is not None:
                self.device.release(lease)

    @rule()
    def save(self) -> None:
        self.device.tier.save()

    @rule()
    def look(self) -> None:
        self.device.tier.look()

    @rule(salt=st.sampled_from([None, b"a", b"b"]))
    def flush(self, salt: bytes | None) -> None:
        self.device.flush(salt)

    @rule(prompt=PROMPT, at=st.sampled_from(["copy_", "index_copy_"]))
    def fail(self, prompt: tuple[bytes, Ids], at: str) -> None:
        """Copies that cannot be launched, or only in part."""

        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("no copy")

        logging.disable()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.Tensor, at, broken)
            self.device.tier.save()
            self.device.tier.prefetch([Prompt(prompt[1], prompt[0])])
        logging.disable(logging.NOTSET)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "device"):
            return
        self.device.check()
        tier, index = self.device.tier, self.device.tier._index.stats
        assert index.cached_pages == index.entered_pages - index.evicted_pages - index.flushed_pages == tier.stats.pages
        assert tier.stats.pages <= self.device.copies.num_pages and not tier.stats.corrupt
        for lease, prompt in self.held:
            assert [self.device.content(page) for page in lease.pages] == prompt.contents

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        for lease, _ in self.held:
            self.device.release(lease)
        self.device.tier.save()
        self.device.tier.settle()
        stats = self.device.tier.stats
        assert stats.bytes_to_host == stats.saved * stats.page_bytes
        assert stats.bytes_to_device == stats.restored * stats.page_bytes
        self.device.flush()
        for pool in (self.device.pool, self.device.tier._host):
            assert sorted(pool._free) == list(range(1, pool.num_pages + 1)) and not pool.leases


TestHostTier = HostMachine.TestCase
TestHostTier.settings = settings(max_examples=40, stateful_step_count=30)
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
