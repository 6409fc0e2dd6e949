"""What both pools of keys and values are made of.

Letters: S slots, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from widebeam.model.config import ModelConfig


class Pools(NamedTuple):
    """Where one layer's keys and values lie: a row of each for every slot, [S, K, D]."""

    k: Tensor
    v: Tensor


def make_pools(config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> list[Pools]:
    """Two allocations for each layer: a compiled step may then write one without touching the others."""
    shape = (num_slots, config.num_kv_heads, config.head_dim)
    return [
        Pools(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))) for _ in range(config.num_layers)
    ]
