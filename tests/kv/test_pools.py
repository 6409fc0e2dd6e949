"""The KV pools lose nothing, give nothing twice, and notice when somebody does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.model.test_attention import CONFIG
from widebeam.kv.beam import BeamKV, ancestor_slots
from widebeam.kv.context import ContextKV, ContextLease
from widebeam.ranges import RangeLease

CPU = torch.device("cpu")


class ContextMachine(RuleBasedStateMachine):
    """Random acquires and releases, against a plain set of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ContextKV(CONFIG, num_pages=9, page_size=4, dtype=torch.float32, device=CPU)
        self.held: list[ContextLease] = []

    @rule(tokens=st.integers(1, 40))
    def acquire(self, tokens: int) -> None:
        pages = -(-tokens // 4)
        lease = self.pool.acquire(tokens)
        assert (lease is None) == (pages > 9 - sum(len(one.pages) for one in self.held))
        if lease is not None:
            assert len(lease.pages) == pages and 0 not in lease.pages
            self.held.append(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(lease)
        with pytest.raises(RuntimeError, match="twice"):
            self.pool.release(lease)

    @invariant()
    def no_page_is_shared_or_lost(self) -> None:
        self.pool.check_integrity()
        pages = [page for lease in self.held for page in lease.pages]
        assert len(pages) == len(set(pages)) == self.pool.pages_used <= self.pool.high_water


class BeamMachine(RuleBasedStateMachine):
    """Random ranges, against a plain array of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BeamKV(CONFIG, num_slots=20, dtype=torch.float32, device=CPU)
        self.held: list[RangeLease] = []

    @rule(count=st.integers(0, 21))
    def acquire(self, count: int) -> None:
        owned = np.zeros(20, dtype=bool)
        for lease in self.held:
            owned[lease.base : lease.base + lease.count] = True
        room = any(not owned[i : i + count].any() for i in range(20 - count + 1))
        assert room == (count <= self.pool.largest_gap)
        lease = self.pool.acquire(count)
        assert (lease is not None) == room
        if lease is not None:
            assert not owned[lease.base : lease.base + lease.count].any()
            self.held.append(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(lease)
        with pytest.raises(RuntimeError, match="twice"):
            self.pool.release(lease)

    @invariant()
    def ranges_are_apart(self) -> None:
        self.pool.check_integrity()
        assert self.pool.used == sum(lease.count for lease in self.held) <= self.pool.high_water


TestContextKV = ContextMachine.TestCase
TestBeamKV = BeamMachine.TestCase


def test_integrity_notices_a_stolen_page() -> None:
    pool = ContextKV(CONFIG, num_pages=3, page_size=4, dtype=torch.float32, device=CPU)
    lease = pool.acquire(8)
    assert lease is not None
    lease.pages.pop()
    with pytest.raises(RuntimeError, match="leak"):
        pool.check_integrity()


def test_what_is_written_is_read_through_pages_and_paths() -> None:
    context = ContextKV(CONFIG, num_pages=5, page_size=4, dtype=torch.float32, device=CPU)
    context.release(context.acquire(9))  # type: ignore[arg-type]
    lease = context.acquire(10)
    assert lease is not None
    k = torch.randn(10, CONFIG.num_kv_heads, CONFIG.head_dim)
    context.pools.of(0).k[[lease.pages[t // 4] * 4 + t % 4 for t in range(10)]] = k
    pages = context.pools.of(0).k.unflatten(0, (-1, 4))
    assert torch.equal(pages[lease.pages].flatten(0, 1)[:10], k)
    assert pages[0].abs().max() == 0


def test_ancestor_slots_follow_the_path() -> None:
    path = torch.tensor([[2, 0, 9], [1, 1, 9], [0, 2, 9]], dtype=torch.int32)
    slots, own = ancestor_slots(path, torch.tensor([2]), torch.tensor(100), torch.tensor(10))
    assert own.tolist() == [110, 111, 112]
    assert slots[:, :2].tolist() == [[102, 110], [101, 111], [100, 112]]
