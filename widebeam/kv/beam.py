"""BeamKV: keys and values of the few tokens that beams decode, found through BeamPath.

A wave holds one contiguous range of slots: slot = base + level * stride + row. Nothing is copied when beams branch or
die; BeamPath, [rows, levels] int32, says for each beam in which row its ancestor of each level stood, and selection
rewrites only that.

Letters: N layers, R rows, J decoded tokens of a beam, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from widebeam.kv.pools import make_pools
from widebeam.model.config import ModelConfig
from widebeam.ranges import Ranges


class BeamKV(Ranges):
    """The slots of the `pools`, given out as ranges."""

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(num_slots)
        self.pools = make_pools(config, num_slots, dtype, device)


def ancestor_slots(path_RJ: Tensor, level: Tensor, base: Tensor, stride: Tensor) -> tuple[Tensor, Tensor]:
    """Where a row's decoded keys lie: (slots [R, J], own slot [R]).

    Called at `level` (one element) >= 1, when tokens of levels 0 .. level - 1 exist: only so many columns mean
    anything. The own slot is that of level - 1, which is written now.
    """
    R, J = path_RJ.shape
    own_R = base + (level - 1) * stride + torch.arange(R, device=path_RJ.device)
    return base + torch.arange(J, device=path_RJ.device) * stride + path_RJ.long(), own_R
