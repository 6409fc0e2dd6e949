"""What both pools of keys and values are made of.

Letters: L layers, S slots, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from widebeam.model.config import ModelConfig


class Pools(NamedTuple):
    """Where keys and values lie: a row of each for every slot, [L, S, K, D], or [S, K, D] of one layer."""

    k: Tensor
    v: Tensor

    def of(self, layer: int) -> Pools:
        """One layer's."""
        return Pools(self.k[layer], self.v[layer])


class Scales(NamedTuple):
    """What the keys and the values of a layer were divided by, before they were stored as float8."""

    k: float
    v: float


UNSCALED = Scales(1.0, 1.0)


def make_pools(config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> Pools:
    """One allocation for all layers, so that a compiled step has few inputs to look at before each replay."""
    shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
    return Pools(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
