"""The catalog's prefix tree on the device: which tokens may follow a beam, and where each of them leads.

Letters: R rows, M candidate slots, C codes of a level's codebook, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from widebeam.constraints.catalog import Catalog


class TrieLevel(NamedTuple):
    """The tree as a search sees it at one level."""

    first_child: Tensor  # int32 [nodes + 1]
    code: Tensor  # int32 [nodes], the code that leads to each node
    terminal: Tensor  # bool [nodes]
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
        slot_M = torch.arange(num_slots, device=node_R.device)
        row_M = torch.searchsorted(end_R, slot_M, right=True)
        real_M = row_M < node_R.shape[0]
        row_M = torch.where(real_M, row_M, 0)
        child_M = first_R[row_M] + slot_M - (end_R[row_M] - count_R[row_M])
        return row_M, torch.where(real_M, child_M, 0), real_M, end_R

    def is_terminal(self, node_M: Tensor) -> Tensor:
        """Whether some item's SID ends at the node."""
        return self.terminal[node_M]

    def has_children(self, node_M: Tensor) -> Tensor:
        """Whether some item's SID goes on below the node."""
        return self.first_child[node_M + 1] > self.first_child[node_M]


class DeviceTrie:
    """Flat arrays of one catalog version (see constraints/index.py), and the head rows of each level's codebook."""

    def __init__(self, catalog: Catalog, head_VH: Tensor) -> None:
        index, device = catalog.index, head_VH.device

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.first_child = put(index.first_child.astype(np.int32))
        self.code = put(index.code.astype(np.int32))
        self.terminal = put(index.num_terminal > 0)
        self.codebooks = [put(tokens.astype(np.int64)) for tokens in catalog.level_token_ids]
        self.heads = [head_VH[codes] for codes in self.codebooks]

    def level(self, level: int) -> TrieLevel:
        """The tree for candidates of that level."""
        return TrieLevel(self.first_child, self.code, self.terminal, self.codebooks[level], self.heads[level])

    @property
    def nodes(self) -> list[Tensor]:
        """The arrays that all levels share."""
        return [self.first_child, self.code, self.terminal]
