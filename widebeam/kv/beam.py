"""BeamKV: keys and values of the few tokens that beams decode, found through BeamPath.

A wave holds one contiguous range of slots: slot = base + level * stride + row. Nothing is copied when beams branch or
die; BeamPath, [rows, levels] int32, says for each beam in which row its ancestor of each level stood, and selection
rewrites only that.

Letters: N layers, R rows, J decoded tokens of a beam, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from widebeam.kv.pools import make_pools
from widebeam.model.config import ModelConfig


@dataclass(eq=False)
class BeamLease:
    """A wave's hold on slots base .. base + count - 1. Released exactly once."""

    base: int
    count: int
    released: bool = field(default=False)


class BeamKV:
    """The slots of the `pools`, given out first fit."""

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pools = make_pools(config, num_slots, dtype, device)
        self.num_slots = num_slots
        self.high_water = 0
        self._leases: list[BeamLease] = []

    @property
    def slots_used(self) -> int:
        return sum(lease.count for lease in self._leases)

    def acquire(self, count: int) -> BeamLease | None:
        """A contiguous range of `count` slots, or None while there is none."""
        base = 0
        for position, lease in enumerate(self._leases):
            if lease.base - base >= count:
                return self._insert(position, BeamLease(base, count))
            base = lease.base + lease.count
        if self.num_slots - base < count:
            return None
        return self._insert(len(self._leases), BeamLease(base, count))

    def _insert(self, position: int, lease: BeamLease) -> BeamLease:
        self._leases.insert(position, lease)
        self.high_water = max(self.high_water, self.slots_used)
        return lease

    def release(self, lease: BeamLease) -> None:
        if lease.released:
            raise RuntimeError("a beam lease was released twice")
        lease.released = True
        self._leases.remove(lease)

    def check_integrity(self) -> None:
        """Leases are in order, disjoint and inside the pool. Raises RuntimeError."""
        end = 0
        for lease in self._leases:
            if lease.released or lease.base < end:
                raise RuntimeError(f"beam slots overlap or a released lease is held at slot {lease.base}")
            end = lease.base + lease.count
        if end > self.num_slots:
            raise RuntimeError(f"a beam lease ends at slot {end} of {self.num_slots}")


def ancestor_slots(path_RJ: Tensor, level: Tensor, base: Tensor, stride: Tensor) -> tuple[Tensor, Tensor]:
    """Where a row's decoded keys lie: (slots [R, J], own slot [R]).

    Called at `level` (one element) >= 1, when tokens of levels 0 .. level - 1 exist: only so many columns mean
    anything. The own slot is that of level - 1, which is written now.
    """
    R, J = path_RJ.shape
    own_R = base + (level - 1) * stride + torch.arange(R, device=path_RJ.device)
    return base + torch.arange(J, device=path_RJ.device) * stride + path_RJ.long(), own_R
