"""Contiguous ranges of places in a buffer, given out first fit. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class RangeLease:
    """A hold on places base .. base + count - 1. Released exactly once."""

    base: int
    count: int
    released: bool = field(default=False)


class Ranges:
    """`size` places. Free is what lies between two leases, so that neighbours given back are one gap."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.high_water = 0
        self._leases: list[RangeLease] = []

    @property
    def used(self) -> int:
        """Places. May be read on any thread."""
        return sum(lease.count for lease in self._leases.copy())

    @property
    def largest_gap(self) -> int:
        """The most places that one lease could get now."""
        ends = [0, *(lease.base + lease.count for lease in self._leases)]
        bases = [*(lease.base for lease in self._leases), self.size]
        return max(base - end for end, base in zip(ends, bases, strict=True))

    def acquire(self, count: int) -> RangeLease | None:
        """A contiguous range of `count` places, or None while there is none."""
        base = 0
        for position, lease in enumerate(self._leases):
            if lease.base - base >= count:
                return self._insert(position, RangeLease(base, count))
            base = lease.base + lease.count
        if self.size - base < count:
            return None
        return self._insert(len(self._leases), RangeLease(base, count))

    def _insert(self, position: int, lease: RangeLease) -> RangeLease:
        self._leases.insert(position, lease)
        self.high_water = max(self.high_water, self.used)
        return lease

    def release(self, lease: RangeLease) -> None:
        if lease.released:
            raise RuntimeError("a range was released twice")
        lease.released = True
        self._leases.remove(lease)

    def check_integrity(self) -> None:
        """Leases are in order, disjoint and inside the buffer. Raises RuntimeError."""
        end = 0
        for lease in self._leases:
            if lease.released or lease.base < end:
                raise RuntimeError(f"ranges overlap or a released one is held at place {lease.base}")
            end = lease.base + lease.count
        if end > self.size:
            raise RuntimeError(f"a range ends at place {end} of {self.size}")
