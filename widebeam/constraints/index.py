"""The catalog as flat arrays: a prefix tree over semantic IDs (SIDs) in breadth-first order. numpy only."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields

import numpy as np

from widebeam.errors import CatalogError


@dataclass(frozen=True, eq=False)
class CatalogIndex:
    """A prefix tree whose nodes are numbered breadth first, so that children lie side by side.

    Items are sorted by SID, a shorter SID before its extensions, and stay in input order within one SID. All items
    below a node are then one range of rows, and all children of a node are one range of nodes (the compressed sparse
    row form of a tree). N is the number of nodes; node 0 is the root.
    """

    depth: int
    """Levels of the longest SID."""
    level_start: np.ndarray
    """int64 [depth + 2]; nodes of depth d are level_start[d] .. level_start[d + 1] - 1."""
    first_child: np.ndarray
    """int32 [N + 1]; children of node x are first_child[x] .. first_child[x + 1] - 1, by ascending code."""
    code: np.ndarray
    """int32 [N]; the node's place in the codebook of its level (root: 0)."""
    item_lo: np.ndarray
    """int32 [N]; first item row below the node."""
    item_hi: np.ndarray
    """int32 [N]; one past the last item row below the node."""
    num_terminal: np.ndarray
    """int32 [N]; items whose SID ends at the node: rows item_lo .. item_lo + num_terminal - 1."""
    mixed_depth: bool
    """Some item ends above the deepest level."""
    _fanouts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(repr=False)
    """Per depth: distinct child counts descending, then nodes and children up to and including each count."""

    @classmethod
    def build(cls, codes: np.ndarray) -> tuple[CatalogIndex, np.ndarray]:
        """Index of the rows of `codes`, and the order that sorts them: int64 [items], sorted position -> input row.

        `codes` is int32 [items >= 1, depth >= 1]: codes from 0 up, and -1 behind the end of a shorter SID. Raises
        CatalogError when the tree has 2**31 nodes or more.
        """
        order = _sort_order(codes)
        level_nodes = list(_levels(codes, order))
        sizes = [1] + [nodes.code.size for nodes in level_nodes]
        level_start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        if level_start[-1] > np.iinfo(np.int32).max:
            raise CatalogError(f"the catalog's prefix tree has {level_start[-1]} nodes; the limit is 2**31 - 1")
        root = _LevelNodes.root(codes)
        first_child = _first_children([root, *level_nodes], level_start)
        index = cls(
            depth=codes.shape[1],
            level_start=level_start,
            first_child=first_child,
            code=np.concatenate([root.code] + [nodes.code for nodes in level_nodes]),
            item_lo=np.concatenate([root.lo] + [nodes.lo for nodes in level_nodes]),
            item_hi=np.concatenate([root.hi] + [nodes.hi for nodes in level_nodes]),
            num_terminal=np.concatenate([root.terminal] + [nodes.terminal for nodes in level_nodes]),
            mixed_depth=bool((codes[:, -1] < 0).any()),
            _fanouts=[_fanout_table(first_child, lo, hi) for lo, hi in itertools.pairwise(level_start)],
        )
        return index, order

    @property
    def num_nodes(self) -> int:
        return self.code.size

    @property
    def num_items(self) -> int:
        return int(self.item_hi[0])

    @property
    def num_sids(self) -> int:
        """Distinct SIDs."""
        return int(np.count_nonzero(self.num_terminal))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, on the host and likewise on a device."""
        return sum(value.nbytes for f in fields(self) if isinstance(value := getattr(self, f.name), np.ndarray))

    def nodes_at(self, depth: int) -> int:
        """Nodes of that depth: distinct prefixes of that length."""
        return int(self.level_start[depth + 1] - self.level_start[depth])

    def max_fanout(self, depth: int) -> int:
        """Most children that one node of that depth has."""
        return int(self._fanouts[depth][0][0])

    def widest(self, depth: int, width: int) -> int:
        """Children that `width` nodes of that depth can have together: the sum of the `width` largest child counts."""
        counts, nodes, children = self._fanouts[depth]
        if width >= nodes[-1]:
            return int(children[-1])
        at = int(np.searchsorted(nodes, width))
        return int(children[at] - (nodes[at] - width) * counts[at])


@dataclass(frozen=True, eq=False)
class _LevelNodes:
    """The nodes of one depth, in order: int32 arrays of one length."""

    code: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    terminal: np.ndarray

    @classmethod
    def root(cls, codes: np.ndarray) -> _LevelNodes:
        zero = np.zeros(1, np.int32)
        return cls(code=zero, lo=zero, hi=np.array([len(codes)], np.int32), terminal=zero)


def _sort_order(codes: np.ndarray) -> np.ndarray:
    """Stable lexicographic order of the rows. As many columns as fit are packed into each 64-bit sort key."""
    keys: list[np.ndarray] = []
    room = 1
    for column in codes.T:
        base = int(column.max()) + 2  # -1 sorts first: a shorter SID before its extensions
        if room == 1 or room * base > 2**64:
            keys.append(np.zeros(len(codes), np.uint64))
            room = 1
        keys[-1] *= np.uint64(base)
        keys[-1] += (column + 1).astype(np.uint64)
        room *= base
    if len(keys) == 1:
        return np.argsort(keys[0], kind="stable")
    return np.lexsort(keys[::-1])


def _levels(codes: np.ndarray, order: np.ndarray) -> list[_LevelNodes]:
    """The nodes of each depth from 1 on: a node begins where the sorted rows' prefix of that length changes."""
    num_items, depth = codes.shape
    levels = []
    changed = np.zeros(num_items, bool)
    changed[0] = True
    column = codes[order, 0]
    for level in range(depth):
        changed[1:] |= column[1:] != column[:-1]
        bounds = np.flatnonzero(changed)
        spelled = column[bounds] >= 0
        lo = bounds[spelled]
        hi = np.append(bounds[1:], num_items)[spelled]
        code = column[lo]
        if level + 1 < depth:
            column = codes[order, level + 1]
            ended = np.concatenate([[0], np.cumsum(column < 0)])
            terminal = ended[hi] - ended[lo]
        else:
            terminal = hi - lo
        levels.append(_LevelNodes(code, lo.astype(np.int32), hi.astype(np.int32), terminal.astype(np.int32)))
    return levels


def _first_children(levels: list[_LevelNodes], level_start: np.ndarray) -> np.ndarray:
    """int32 [N + 1]. A node's first child is the first node one level down that begins at or behind its first row."""
    parts = [
        level_start[depth + 1] + np.searchsorted(levels[depth + 1].lo, nodes.lo)
        for depth, nodes in enumerate(levels[:-1])
    ]
    leaves = np.full(levels[-1].lo.size + 1, level_start[-1])
    return np.concatenate([*parts, leaves]).astype(np.int32)


def _fanout_table(first_child: np.ndarray, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of nodes lo..hi-1: distinct child counts descending; nodes, and children, with at least that many children."""
    nodes_with = np.bincount(np.diff(first_child[lo : hi + 1]))
    counts = np.flatnonzero(nodes_with)[::-1]
    nodes = nodes_with[counts]
    return counts, np.cumsum(nodes), np.cumsum(nodes * counts)
