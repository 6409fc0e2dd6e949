"""The catalog's prefix tree on the device: which tokens may follow a beam, and where each of them leads.

Letters: R rows, M candidate slots, C codes of a level's codebook, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from widebeam.constraints.catalog import Catalog


class Masks(NamedTuple):
    """Which items each request of a wave allows, as F distinct masks over the catalog's rows."""

    mask_B1: Tensor  # int64, each request's mask; -1: all items
    words_FW: Tensor  # int64, bit i of word w is row 64 w + i
    before_FW: Tensor  # int32 [F, W + 1], allowed rows before each word

    def any_among(self, mask_M: Tensor, lo_M: Tensor, hi_M: Tensor) -> Tensor:
        """Whether rows lo .. hi - 1 hold an allowed one, bool [M]: two counts and a difference, however wide the range
        (Jacobson's rank, 1989)."""
        return (mask_M < 0) | (self._count(mask_M, hi_M) > self._count(mask_M, lo_M))

    def _count(self, mask_M: Tensor, row_M: Tensor) -> Tensor:
        """Allowed rows before each row."""
        mask_M, word_M = mask_M.clamp_min(0), row_M >> 6
        inside_M = self.words_FW[mask_M, word_M.clamp_max(self.words_FW.shape[1] - 1)] & ((1 << (row_M & 63)) - 1)
        return self.before_FW[mask_M, word_M] + _ones(inside_M)


def _ones(x: Tensor) -> Tensor:
    """Bits that are set in each int64, by adding neighbours."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101) >> 56


class TrieLevel(NamedTuple):
    """The tree as a search sees it at one level."""

    first_child: Tensor  # int32 [nodes + 1]
    code: Tensor  # int32 [nodes], the code that leads to each node
    terminal: Tensor  # bool [nodes]
    item_lo: Tensor  # int32 [nodes], the first item row below each node
    item_hi: Tensor  # int32 [nodes], one past the last
    item_own: Tensor | None  # int32 [nodes], one past the last whose SID the node spells; where SIDs differ in length
    codebook: Tensor  # int64 [C], token ids
    head: Tensor  # [C, H], their rows of the output projection

    def expand(self, node_R: Tensor, live_R: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Children of all live rows as one flat list of M = `num_slots`.

        (row [M], child node [M], real [M] bool), ordered by row, then by token, and where each row's children end, [R].
        Costs what the rows' children are, however unevenly the tree branches; the host knows a bound on their number
        (CatalogIndex.widest).
        """
        first_R = self.first_child[node_R].long()
        count_R = torch.where(live_R, self.first_child[node_R + 1].long() - first_R, 0)
        end_R = count_R.cumsum(0)
        ahead_R = first_R - (end_R - count_R)  # of its slot, each of a row's children is so far ahead
        slot_M = torch.arange(num_slots, device=node_R.device)
        row_M = torch.searchsorted(end_R, slot_M, right=True)
        real_M = row_M < node_R.shape[0]
        row_M = torch.where(real_M, row_M, 0)
        return row_M, torch.where(real_M, ahead_R[row_M] + slot_M, 0), real_M, end_R

    def allows(self, masks: Masks, mask_M: Tensor, node_M: Tensor) -> Tensor:
        """Whether some allowed item lies at or below the node."""
        return masks.any_among(mask_M, self.item_lo[node_M].long(), self.item_hi[node_M].long())

    def is_terminal(self, node_M: Tensor, masks: Masks | None, mask_M: Tensor | None) -> Tensor:
        """Whether some allowed item's SID ends at the node, which is allowed."""
        ends_M = self.terminal[node_M]
        if masks is None or mask_M is None or self.item_own is None:
            return ends_M
        return ends_M & masks.any_among(mask_M, self.item_lo[node_M].long(), self.item_own[node_M].long())

    def has_children(self, node_M: Tensor, masks: Masks | None, mask_M: Tensor | None) -> Tensor:
        """Whether some allowed item's SID goes on below the node, which is allowed."""
        goes_on_M = self.first_child[node_M + 1] > self.first_child[node_M]
        if masks is None or mask_M is None or self.item_own is None:
            return goes_on_M
        return goes_on_M & masks.any_among(mask_M, self.item_own[node_M].long(), self.item_hi[node_M].long())


class DeviceTrie:
    """Flat arrays of one catalog version (see constraints/index.py), the head rows of each level's codebook, and room
    for the masks of one wave at a time."""

    def __init__(self, catalog: Catalog, head_VH: Tensor, max_masks: int = 1) -> None:
        index, device = catalog.index, head_VH.device
        words = -(-index.num_items // 64)
        self.words_FW = torch.zeros(max_masks, words, dtype=torch.int64, device=device)
        self.before_FW = torch.zeros(max_masks, words + 1, dtype=torch.int32, device=device)

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.first_child = put(index.first_child.astype(np.int32))
        self.code = put(index.code.astype(np.int32))
        self.terminal = put(index.num_terminal > 0)
        self.item_lo, self.item_hi = put(index.item_lo.astype(np.int32)), put(index.item_hi.astype(np.int32))
        own = index.item_lo + index.num_terminal
        self.item_own = put(own.astype(np.int32)) if index.mixed_depth else None
        self.codebooks = [put(tokens.astype(np.int64)) for tokens in catalog.level_token_ids]
        self.heads = [head_VH[codes] for codes in self.codebooks]

    def level(self, level: int) -> TrieLevel:
        """The tree for candidates of that level."""
        return TrieLevel(*self.nodes, self.codebooks[level], self.heads[level])

    @property
    def nodes(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The arrays that all levels share."""
        return (self.first_child, self.code, self.terminal, self.item_lo, self.item_hi, self.item_own)

    def masks(self, mask_B1: Tensor, words_FW: Tensor, before_FW: Tensor) -> Masks:
        """Put a wave's masks in their room."""
        self.words_FW[: len(words_FW)].copy_(words_FW)
        self.before_FW[: len(before_FW)].copy_(before_FW)
        return Masks(mask_B1, self.words_FW, self.before_FW)
