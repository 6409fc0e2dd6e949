"""The catalog as flat arrays: a prefix tree over semantic IDs (SIDs) in breadth-first order. numpy only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from widebeam.errors import CatalogError

_PIECE = 1 << 18
"""Elements of one call to numpy that lets no other thread run: cumsum and bincount keep the interpreter's lock."""


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
        order = sort_order(codes)
        return cls.of_sorted(np.ascontiguousarray(codes[order].T)), order

    @classmethod
    def of_sorted(cls, codes: np.ndarray) -> CatalogIndex:
        """Index of items that are sorted already: int32 [depth, items], a level in one piece. Raises as `build`."""
        depth, num_items = codes.shape
        ranges = [(np.zeros(1, np.int32), np.array([num_items], np.int32)), *_ranges(codes)]
        level_start = np.concatenate([[0], np.cumsum([lo.size for lo, _ in ranges])]).astype(np.int64)
        num_nodes = int(level_start[-1])
        if num_nodes > np.iinfo(np.int32).max:
            raise CatalogError(f"the catalog's prefix tree has {num_nodes} nodes; the limit is 2**31 - 1")
        code, num_terminal = np.zeros(num_nodes, np.int32), np.zeros(num_nodes, np.int32)
        first_child = np.full(num_nodes + 1, num_nodes, np.int32)
        before = np.empty(num_items + 1, np.int32)
        before.fill(0)  # lets other threads run while the system finds the memory, which _count_before would not
        for level, (lo, hi) in enumerate(ranges):
            nodes = slice(*level_start[level : level + 2])
            if level > 0:
                np.take(codes[level - 1], lo, out=code[nodes])
            if level == depth:
                np.subtract(hi, lo, out=num_terminal[nodes])
                break
            if (codes[level] < 0).any():
                _count_before(codes[level] < 0, before)
                num_terminal[nodes] = before[hi] - before[lo]
            # a node's first child is the first node one level down that begins at or behind its first row
            begins = np.zeros(num_items, bool)
            begins[ranges[level + 1][0]] = True
            _count_before(begins, before)
            np.take(before, lo, out=first_child[nodes])
            first_child[nodes] += np.int32(level_start[level + 1])
        item_lo, item_hi = (np.concatenate(sides) for sides in zip(*ranges, strict=True))
        mixed_depth = bool((codes[-1] < 0).any())
        return cls.of_arrays((level_start, first_child, code, item_lo, item_hi, num_terminal), mixed_depth)

    @classmethod
    def of_arrays(cls, arrays: Sequence[np.ndarray], mixed_depth: bool) -> CatalogIndex:
        """The index that has these `arrays`."""
        level_start, first_child, code, item_lo, item_hi, num_terminal = arrays
        return cls(
            depth=level_start.size - 2,
            level_start=level_start,
            first_child=first_child,
            code=code,
            item_lo=item_lo,
            item_hi=item_hi,
            num_terminal=num_terminal,
            mixed_depth=mixed_depth,
            _fanouts=[_fanout_table(first_child, lo, hi) for lo, hi in itertools.pairwise(level_start)],
        )

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All that an index is made of, but for whether some item ends early."""
        return self.level_start, self.first_child, self.code, self.item_lo, self.item_hi, self.num_terminal

    @property
    def num_nodes(self) -> int:
        return self.code.size

    @property
    def num_items(self) -> int:
        return int(self.item_hi[0])

    @functools.cached_property
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


def sort_order(codes: np.ndarray) -> np.ndarray:
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


def _ranges(codes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of the nodes of each depth from 1 on, in order: first row, and one past the last, int32. A node begins where the
    sorted rows' prefix of that length changes."""
    num_items = codes.shape[1]
    changed = np.zeros(num_items, bool)
    changed[0] = True
    for column in codes:
        changed[1:] |= column[1:] != column[:-1]
        bounds = _marked(changed)
        lo, hi = bounds[:-1], bounds[1:]
        spelled = column[lo] >= 0
        yield (lo, hi) if spelled.all() else (lo[spelled], hi[spelled])


def _marked(marks: np.ndarray) -> np.ndarray:
    """int32; the marked rows, and behind them the number of all. In pieces, since numpy finds them as int64."""
    rows = np.empty(np.count_nonzero(marks) + 1, np.int32)
    found = 0
    for start in range(0, marks.size, _PIECE):
        some = np.flatnonzero(marks[start : start + _PIECE])
        np.add(some, start, out=rows[found : found + some.size], casting="same_kind")
        found += some.size
    rows[found] = marks.size
    return rows


def _count_before(marks: np.ndarray, counts: np.ndarray) -> None:
    """Set `counts`, int32 [items + 1], to the marked rows before each row, and of all; it begins with 0."""
    for start in range(0, marks.size, _PIECE):
        piece = counts[start + 1 : start + 1 + _PIECE]
        np.cumsum(marks[start : start + _PIECE], dtype=np.int32, out=piece)
        piece += counts[start]


def _fanout_table(first_child: np.ndarray, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of nodes lo..hi-1: distinct child counts descending; nodes, and children, with at least that many children."""
    if first_child[lo] == first_child[hi]:  # of leaves, which are many
        return np.array([0]), np.array([hi - lo]), np.array([0])
    children = np.diff(first_child[lo : hi + 1])
    nodes_with = np.zeros(children.max() + 1, np.int64)
    for start in range(0, children.size, _PIECE):
        nodes_with += np.bincount(children[start : start + _PIECE], minlength=nodes_with.size)
    counts = np.flatnonzero(nodes_with)[::-1]
    nodes = nodes_with[counts]
    return counts, np.cumsum(nodes), np.cumsum(nodes * counts)
