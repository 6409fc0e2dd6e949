"""A device whose prefix cache has a host tier, and prompts that visit it.

What prefill would write is a number made of the salt and the tokens up to the end of a page, in every element.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.kv.cached_prompts import S, pages_of, tokens
from tests.model.test_attention import CONFIG
from widebeam.kv.context import ContextKV, ContextLease
from widebeam.kv.copies import PageCopies, Transfer
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
