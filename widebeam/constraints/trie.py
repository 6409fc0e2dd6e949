"""The catalog's prefix tree on the device: which tokens may follow a beam, and where each of them leads.

Letters: R rows, M candidate slots, C codes of a level's codebook, padded, B requests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Masks(NamedTuple):
    """Which items each request of a wave allows: a mask over the catalog's rows, somewhere in the pool of all masks."""

    place_B1: Tensor  # int64, where each request's mask begins in the pool; -1: all items
    words: Tensor  # int64 [places], bit i of a mask's word w is row 64 w + i; behind its last word is one of no meaning
    before: Tensor  # int32 [places], allowed rows before each word, and behind the last

    def any_among(self, place_M: Tensor, lo_M: Tensor, hi_M: Tensor) -> Tensor:
        """Whether rows lo .. hi - 1 hold an allowed one, bool [M], by the mask at `place_M`: two counts and a
        difference, however wide the range (Jacobson's rank, 1989)."""
        return (place_M < 0) | (self._count(place_M, hi_M) > self._count(place_M, lo_M))

    def _count(self, place_M: Tensor, row_M: Tensor) -> Tensor:
        """Allowed rows before each row."""
        word_M = place_M.clamp_min(0) + (row_M >> 6)
        return self.before[word_M] + _ones(self.words[word_M] & ((1 << (row_M & 63)) - 1))


def _ones(x: Tensor) -> Tensor:
    """Bits that are set in each int64, by adding neighbours."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101) >> 56


class Nodes(NamedTuple):
    """The nodes of many trees, one behind the other: int32 [places]. All values count from their own tree's start."""

    first_child: Tensor  # children of node x are first_child[x] .. first_child[x + 1] - 1
    code: Tensor  # the code that leads to each node
    item_lo: Tensor  # the first item row below each node
    item_own: Tensor  # one past the last whose SID the node spells
    item_hi: Tensor  # one past the last below it


class TrieLevel(NamedTuple):
    """One tree as a search sees it at one level. Nodes are numbered from the tree's own root, 0."""

    nodes: Nodes
    base: Tensor  # int64, 0-d, where the tree begins among the nodes
    codebook_C: Tensor  # int64, token ids; behind `num_codes` any
    num_codes: Tensor  # int64, 0-d

    def expand(self, node_R: Tensor, live_R: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Children of all live rows as one flat list of M = `num_slots`.

        (row [M], child node [M], real [M] bool), ordered by row, then by token, and where each row's children end, [R].
        Costs what the rows' children are, however unevenly the tree branches; the host knows a bound on their number
        (CatalogIndex.widest).
        """
        first_R = self._of(self.nodes.first_child, node_R)
        count_R = torch.where(live_R, self._of(self.nodes.first_child, node_R + 1) - first_R, 0)
        end_R = count_R.cumsum(0)
        ahead_R = first_R - (end_R - count_R)  # of its slot, each of a row's children is so far ahead
        slot_M = torch.arange(num_slots, device=node_R.device)
        row_M = torch.searchsorted(end_R, slot_M, right=True)
        real_M = row_M < node_R.shape[0]
        row_M = torch.where(real_M, row_M, 0)
        return row_M, torch.where(real_M, ahead_R[row_M] + slot_M, 0), real_M, end_R

    def code(self, node_M: Tensor) -> Tensor:
        """The code that leads to each node."""
        return self._of(self.nodes.code, node_M)

    def padding_C(self) -> Tensor:
        """Which codes are none, but only fill up the codebook."""
        return torch.arange(self.codebook_C.shape[0], device=self.codebook_C.device) >= self.num_codes

    def allows(self, masks: Masks, place_M: Tensor, node_M: Tensor) -> Tensor:
        """Whether some allowed item lies at or below the node."""
        return masks.any_among(place_M, self._of(self.nodes.item_lo, node_M), self._of(self.nodes.item_hi, node_M))

    def is_terminal(self, node_M: Tensor, masks: Masks | None, place_M: Tensor | None) -> Tensor:
        """Whether some allowed item's SID ends at the node, which is allowed."""
        lo_M, own_M = self._of(self.nodes.item_lo, node_M), self._of(self.nodes.item_own, node_M)
        if masks is None or place_M is None:
            return own_M > lo_M
        return (own_M > lo_M) & masks.any_among(place_M, lo_M, own_M)

    def has_children(self, node_M: Tensor, masks: Masks | None, place_M: Tensor | None) -> Tensor:
        """Whether some allowed item's SID goes on below the node, which is allowed."""
        own_M, hi_M = self._of(self.nodes.item_own, node_M), self._of(self.nodes.item_hi, node_M)
        if masks is None or place_M is None:
            return hi_M > own_M
        return (hi_M > own_M) & masks.any_among(place_M, own_M, hi_M)

    def _of(self, array: Tensor, node: Tensor) -> Tensor:
        """What the array says of these nodes, int64."""
        return array[node + self.base].long()
