"""Tensor parallelism: which part of the network a rank computes, and how ranks put their parts together.

A rank is a plain network over a part of the heads and of the MLP. What it computes of a sum is summed over all ranks;
what it computes of an array is gathered. The collectives are functional: a compiler traces them, and CUDA graphs
capture them. As all ranks get the same bits from one, whatever follows is the same on all of them.

Letters: R rows, X anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from widebeam.errors import ConfigError
from widebeam.model.config import ModelConfig

DIVIDED = ("num_heads", "num_kv_heads", "intermediate_size")


class Part(NamedTuple):
    """Consecutive elements that a rank works on."""

    first: int
    size: int
    room: int
    """Most that a rank has."""
    spare: bool
    """They are another rank's: there are too few, and none is nobody's."""


@dataclass(frozen=True)
class Shard:
    """One of `size` equal parts."""

    rank: int = 0
    size: int = 1
    group: str = ""
    """Name of the ranks' process group."""

    def config(self, config: ModelConfig) -> ModelConfig:
        """What a rank computes, as a network of its own. Raises ConfigError if it does not divide."""
        for name in DIVIDED:
            if getattr(config, name) % self.size:
                raise ConfigError(
                    f"--tensor-parallel-size {self.size} does not divide the model's {name}, {getattr(config, name)}"
                )
        return msgspec.structs.replace(config, **{name: getattr(config, name) // self.size for name in DIVIDED})

    def part(self, count: int, unit: int = 1) -> Part:
        """This rank's of `count` elements in order, cut at multiples of `unit`."""
        units = -(-count // unit)
        room = -(-units // self.size)
        first = min(self.rank * room, units - 1)
        return Part(
            first * unit, min(count, (first + room) * unit) - first * unit, room * unit, self.rank * room >= units
        )

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""
        return self._reduced(x, "sum")

    def largest(self, x: Tensor) -> Tensor:
        """The largest over all ranks, element by element."""
        return self._reduced(x, "max")

    def gather(self, x_RX: Tensor) -> Tensor:
        """Arrays of one shape of all ranks, in order: [ranks, R, X]."""
        ops = torch.ops._c10d_functional
        flat = ops.wait_tensor(ops.all_gather_into_tensor(x_RX.contiguous(), self.size, self.group))
        return flat.unflatten(0, (self.size, -1))

    def least(self, number: int, device: torch.device) -> int:
        """The least that any rank says. Waits for all of them."""
        return int(self._reduced(torch.tensor([number], device=device), "min"))

    def joined(self, x_RX: Tensor, total: int, room: int) -> Tensor:
        """The columns of all ranks, side by side: [R, total]. Each gives the columns of its part of them, and `room` is
        the most that one has."""
        padded = torch.nn.functional.pad(x_RX, (0, room - x_RX.shape[1]))
        return self.gather(padded).transpose(0, 1).flatten(1)[:, :total]

    def _reduced(self, x: Tensor, how: str) -> Tensor:
        if self.size == 1:
            return x
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x.contiguous(), how, self.group))


WHOLE = Shard()
"""Of one process."""
