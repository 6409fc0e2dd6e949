"""ContextKV: keys and values of prompts, in pages that prefill writes once and every level reads.

Letters: N layers, P pages, S page size in tokens, K key/value heads, D head size, T packed prompt tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from widebeam.kv.pools import make_pools
from widebeam.model.config import ModelConfig


@dataclass(eq=False)
class ContextLease:
    """A request's hold on pages. Released exactly once, by the pool that gave it."""

    pages: list[int]
    num_tokens: int
    released: bool = field(default=False)


class ContextKV:
    """The paged pool: the `pools` have P S slots: page p holds slots p S .. p S + S - 1.

    Page 0 belongs to nobody: rows that only fill up a shape write there.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pools = make_pools(config, (num_pages + 1) * page_size, dtype, device)
        self.page_size = page_size
        self.num_pages = num_pages
        self.high_water = 0
        self._free = list(range(num_pages, 0, -1))
        self._leases: set[ContextLease] = set()

    @property
    def pages_used(self) -> int:
        return self.num_pages - len(self._free)

    def acquire(self, num_tokens: int) -> ContextLease | None:
        """Pages for so many tokens, or None while too few are free."""
        count = -(-num_tokens // self.page_size)
        if count > len(self._free):
            return None
        lease = ContextLease([self._free.pop() for _ in range(count)], num_tokens)
        self._leases.add(lease)
        self.high_water = max(self.high_water, self.pages_used)
        return lease

    def release(self, lease: ContextLease) -> None:
        if lease.released:
            raise RuntimeError("a context lease was released twice")
        lease.released = True
        self._leases.remove(lease)
        self._free.extend(reversed(lease.pages))

    def slots(self, lease: ContextLease) -> np.ndarray:
        """The slot of each of the lease's tokens, int64."""
        first = np.asarray(lease.pages, dtype=np.int64) * self.page_size
        return (first[:, None] + np.arange(self.page_size)).reshape(-1)[: lease.num_tokens]

    def check_integrity(self) -> None:
        """Every page is free or held by exactly one lease. Raises RuntimeError."""
        held = [page for lease in self._leases for page in lease.pages]
        if sorted(held + self._free) != list(range(1, self.num_pages + 1)):
            raise RuntimeError(f"context pages leak: {len(held)} held, {len(self._free)} free of {self.num_pages}")
        if any(lease.released for lease in self._leases):
            raise RuntimeError("a released context lease is still held")
