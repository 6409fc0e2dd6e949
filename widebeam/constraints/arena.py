"""Rooms on the device for catalogs and for masks, taken once and never moved, so that graphs find what lies in them.

A catalog version, or the masks of a wave, holds a range of such a room; where it begins is data. So a new version needs
no other graphs than the one before.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filters import ItemMask
from widebeam.constraints.trie import Nodes, TrieLevel
from widebeam.engine.shapes import code_rung
from widebeam.engine.staging import Places, Staged, Upload, mark, send
from widebeam.errors import CatalogError
from widebeam.faults import counted
from widebeam.ranges import RangeLease, Ranges

NODE_BYTES = 4 * len(Nodes._fields)
MASK_BYTES = 8 + 4
"""Of one place in the pool of masks: a word and a count."""


class DeviceTrie:
    """Where one catalog version lies in the arena, and its codebooks, padded to a rung."""

    def __init__(self, catalog: Catalog, nodes: Nodes, lease: RangeLease) -> None:
        device = nodes.code.device
        self.lease = lease
        self.ready = False
        """Its nodes are on the device."""
        self.reserved = mark(device)
        """Whatever ran over this range before lies before it."""
        self._nodes = nodes
        self._levels = [
            Staged.of({"base": int64(lease.base), "size": int64(tokens.size), "book": padded_book(tokens)}, device)
            for tokens in catalog.level_token_ids
        ]

    def level(self, level: int, places: Places) -> TrieLevel:
        """The tree for candidates of that level, brought to its place."""
        own = places.copy(self._levels[level])
        return TrieLevel(self._nodes, own["base"], own["book"], own["size"])


class CatalogArena(Ranges):
    """The nodes of all catalog versions that anybody holds."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes // NODE_BYTES)
        self.nodes = Nodes(*(torch.empty(self.size, dtype=torch.int32, device=device) for _ in Nodes._fields))
        self._upload = Upload(device)
        self._tries: weakref.WeakKeyDictionary[Catalog, DeviceTrie] = weakref.WeakKeyDictionary()
        self._dropped: deque[RangeLease] = deque()
        """Ranges of versions that nobody holds any more, as noted by whatever thread let go of them."""

    def __len__(self) -> int:
        """Versions that have a range."""
        return len(self._tries)

    @property
    def used_bytes(self) -> int:
        return self.used * NODE_BYTES

    @property
    def size_bytes(self) -> int:
        return self.size * NODE_BYTES

    def reserve(self, catalog: Catalog) -> None:
        """Give a catalog version a range, which it has for as long as somebody holds the catalog.

        On the GPU thread. Raises CatalogError if there is none so long.
        """
        if catalog not in self._tries:
            lease = self._acquire_for(catalog)
            weakref.finalize(catalog, self._dropped.append, lease).atexit = False
            self._tries[catalog] = DeviceTrie(catalog, self.nodes, lease)

    def upload(self, catalog: Catalog) -> None:
        """Fill a reserved range while waves run, and wait until the device has it all. On any thread."""
        trie, index = self._tries[catalog], catalog.index
        if trie.ready:
            return
        item_own = index.item_lo + index.num_terminal
        arrays = (index.first_child, index.code, index.item_lo, item_own, index.item_hi)
        base = trie.lease.base
        self._upload.send(zip(arrays, (array[base:] for array in self.nodes), strict=True), trie.reserved)
        trie.ready = True

    def trie(self, catalog: Catalog) -> DeviceTrie:
        """A version that has been uploaded."""
        trie = self._tries[catalog]
        if not trie.ready:
            raise RuntimeError(f"catalog {catalog.name!r} has not been uploaded")
        return trie

    def lease(self, catalog: Catalog) -> RangeLease:
        """The range of a version that has one."""
        return self._tries[catalog].lease

    def place(self, catalog: Catalog, lease: RangeLease) -> None:
        """Give a version a range that somebody else has found. On the GPU thread."""
        self._tries[catalog] = DeviceTrie(catalog, self.nodes, lease)

    def free_dropped(self) -> None:
        """Take back the ranges of versions that nobody holds any more. On the GPU thread: only waves launched before
        may still read them, and `reserve` lets the device pass those before a range is written again."""
        while self._dropped:
            self.release(self._dropped.popleft())

    def _acquire_for(self, catalog: Catalog) -> RangeLease:
        places = num_places(catalog)
        self.free_dropped()
        lease = self.acquire(places)
        if lease is None:
            gc.collect()  # a version that nobody holds may wait for it
            self.free_dropped()
            lease = self.acquire(places)
        if lease is None:
            needed, free, all_free, size = (
                f"{count * NODE_BYTES / 2**20:.1f} MiB"
                for count in (places, self.largest_gap, self.size - self.used, self.size)
            )
            raise CatalogError(
                f"catalog {catalog.name!r} takes {needed} on the device, and of {size} for catalogs {all_free} are "
                f"free, {free} of it in one piece: {(places - self.largest_gap) * NODE_BYTES / 2**20:.1f} MiB are "
                f"missing. Raise --catalog-memory-gib"
            )
        return lease

    def check_integrity(self) -> None:
        """Ranges are apart, and every version has one. Raises RuntimeError."""
        self.free_dropped()
        super().check_integrity()
        if any(trie.lease.released for trie in list(self._tries.values())):
            raise RuntimeError("a catalog that is in use has no range")


class MaskPool(Ranges):
    """The masks of the waves on the device; see trie.Masks."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes // MASK_BYTES)
        self.words = torch.empty(self.size, dtype=torch.int64, device=device)
        self.before = torch.empty(self.size, dtype=torch.int32, device=device)

    def put(self, masks: Sequence[ItemMask], base: int) -> None:
        """Copy masks to places from `base` on, in stream order."""
        beyond = np.zeros(1, np.int64)
        words: list[np.ndarray] = []
        for mask in masks:
            words += [mask.words.view(np.int64), beyond]
        send(words, self.words[base:])
        send([mask.before for mask in masks], self.before[base:])

    def check_room(self, catalog: Catalog) -> None:
        """Raise CatalogError if not even one mask of this catalog fits."""
        places = ItemMask.places_for(catalog.num_items)
        if places > self.size:
            raise CatalogError(
                f"a filter over the {counted(catalog.num_items, 'item', ',')} of catalog {catalog.name!r} takes "
                f"{places * MASK_BYTES / 2**20:.1f} MiB on the device, and filters have "
                f"{self.size * MASK_BYTES / 2**20:.1f} MiB. Raise --filter-memory-gib"
            )


def num_places(catalog: Catalog) -> int:
    """Places of the arena that a catalog version takes: `first_child` has one more than there are nodes."""
    return catalog.index.num_nodes + 1


def int64(number: int) -> np.ndarray:
    return np.array(number, dtype=np.int64)


def padded_book(token_ids: np.ndarray) -> np.ndarray:
    """A level's codebook, filled up to a rung: int64 [C]."""
    return np.pad(token_ids.astype(np.int64), (0, code_rung(token_ids.size) - token_ids.size))


def device_bytes(catalog: Catalog) -> int:
    """What a catalog version takes on the device: its range of the arena, and its codebooks beside it."""
    books = sum(padded_book(tokens).nbytes for tokens in catalog.level_token_ids)
    return num_places(catalog) * NODE_BYTES + books
