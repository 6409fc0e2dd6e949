"""Pages go to the host's memory and come back in any order of events: a lease is given what its own tokens left, and
nothing is lost."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kv.cached_prompts import PROMPT, S
from tests.kv.host_device import Device, Ids, Prompt
from widebeam.kv.context import ContextLease


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
