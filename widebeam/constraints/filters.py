"""Which items of a catalog a request's filters allow, as a bitmap over the catalog's rows."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa

from widebeam.constraints.filter_spec import Filters, Predicate
from widebeam.constraints.predicates import bind, matches
from widebeam.errors import InvalidRequest
from widebeam.faults import counted, find_fault

if TYPE_CHECKING:
    from widebeam.constraints.catalog import Catalog
    from widebeam.constraints.rows import Metadata

MASK_CACHE_BYTES = 256 << 20
"""For the masks that one catalog version keeps: about 135 of 10 million items."""


class ItemMask:
    """A set of catalog rows with a rank table, so that counting those of a range takes two look-ups. Immutable."""

    def __init__(self, words: np.ndarray, num_items: int) -> None:
        """Takes over `words`, whose bits behind the last item are 0."""
        self.num_items = num_items
        self.words = words
        """uint64 [ceil(items / 64)]; bit i of word w is row 64 w + i."""
        self.before = np.zeros(words.size + 1, np.int32)
        """int32 [words + 1]; allowed rows before each word."""
        np.cumsum(np.bitwise_count(words), dtype=np.int32, out=self.before[1:])
        words.setflags(write=False)
        self.before.setflags(write=False)

    @classmethod
    def everything(cls, num_items: int) -> ItemMask:
        words = np.full(-(-num_items // 64), ~np.uint64(0))
        words[-1] >>= np.uint64(-num_items % 64)
        return cls(words, num_items)

    @classmethod
    def of_bits(cls, bits: np.ndarray) -> ItemMask:
        """From uint8 [items], 1 for allowed rows."""
        packed = np.packbits(bits, bitorder="little")
        return cls(np.pad(packed, (0, -packed.size % 8)).view(np.uint64), bits.size)

    @classmethod
    def of_rows(cls, rows: np.ndarray, num_items: int) -> ItemMask:
        """These rows, in any order."""
        words = np.zeros(-(-num_items // 64), np.uint64)
        np.bitwise_or.at(words, rows >> 6, _bit(rows))
        return cls(words, num_items)

    def without(self, rows: np.ndarray) -> ItemMask:
        """All but these rows."""
        words = self.words.copy()
        np.bitwise_and.at(words, rows >> 6, ~_bit(rows))
        return ItemMask(words, self.num_items)

    def __and__(self, other: ItemMask) -> ItemMask:
        return ItemMask(self.words & other.words, self.num_items)

    @staticmethod
    def places_for(num_items: int) -> int:
        """Places that a mask over so many items takes in the device's pool: its words and one more."""
        return -(-num_items // 64) + 1

    @property
    def places(self) -> int:
        return self.before.size

    @property
    def num_allowed(self) -> int:
        return int(self.before[-1])

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.before.nbytes

    def allows(self, rows: np.ndarray | int) -> np.ndarray:
        """bool, of the shape of `rows`."""
        rows = np.asarray(rows)
        return (self.words[rows >> 6] & _bit(rows)) != 0

    def count(self, lo: np.ndarray | int, hi: np.ndarray | int) -> np.ndarray:
        """Allowed ones among the rows lo .. hi - 1, for each pair: int64."""
        return self._rank(np.asarray(hi)) - self._rank(np.asarray(lo))

    def _rank(self, rows: np.ndarray) -> np.ndarray:
        """Allowed rows before each row, 0 to the number of items."""
        words = self.words[np.minimum(rows >> 6, self.words.size - 1)]
        return self.before[rows >> 6].astype(np.int64) + np.bitwise_count(words & (_bit(rows) - np.uint64(1)))


def _bit(rows: np.ndarray) -> np.ndarray:
    """The bit of each row in its word."""
    return np.uint64(1) << (rows & 63).astype(np.uint64)


class MaskCache:
    """Masks of one catalog version by what they stand for; those used least recently go first. For any thread."""

    def __init__(self, max_bytes: int = MASK_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._masks: OrderedDict[bytes, ItemMask] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._building = threading.RLock()

    def get(self, key: bytes, build: Callable[[], ItemMask]) -> ItemMask:
        """The mask of that key, built if it is not kept. One thread builds at a time; `build` may call `get`."""
        mask = self._find(key)
        if mask is not None:
            return mask
        with self._building:
            mask = self._find(key)  # another thread may have built it meanwhile
            if mask is None:
                mask = build()
                self._keep(key, mask)
        return mask

    def _find(self, key: bytes) -> ItemMask | None:
        with self._lock:
            if key in self._masks:
                self._masks.move_to_end(key)
            return self._masks.get(key)

    def _keep(self, key: bytes, mask: ItemMask) -> None:
        with self._lock:
            self._masks[key] = mask
            self._bytes += mask.nbytes
            while self._bytes > self._max_bytes:
                self._bytes -= self._masks.popitem(last=False)[1].nbytes


def allowed_items(catalog: Catalog, filters: Filters) -> tuple[ItemMask, list[str]]:
    """The items that pass all filters, and warnings. Equal conditions give the same mask as long as it is kept.

    A condition that is new to the catalog version reads its whole column, which is not for an event loop. Raises
    InvalidRequest.
    """
    filters = _checked(filters)
    warnings: list[str] = []
    mask = _meeting(catalog, _conditions(catalog, filters))
    if filters.allow is not None:
        mask &= ItemMask.of_rows(_known(catalog, filters.allow, "allow", warnings), catalog.num_items)
    if filters.deny:
        mask = mask.without(_known(catalog, filters.deny, "deny", warnings))
    if not mask.num_allowed:
        warnings.append("the filters leave no item")
    return mask, warnings


def check_named(named: Mapping[str, tuple[Predicate, ...]], metadata: Metadata) -> None:
    """Raise InvalidRequest for a named filter that its columns, which exist, do not allow."""
    for name, predicates in named.items():
        for number, predicate in enumerate(predicates):
            where = f"filters.{name}[{number}]"
            bind(predicate, _column(metadata.column, predicate, where).type, where)


def _checked(filters: Filters) -> Filters:
    """As decoded from a request, with every bound enforced, however it was made."""
    try:
        return msgspec.json.decode(msgspec.json.encode(filters), type=Filters)
    except msgspec.ValidationError as error:
        fault = find_fault(error, Filters).under("filters")
        raise InvalidRequest(fault.text, param=fault.place) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"filters must be values of JSON: {error}", param="filters") from None


def _conditions(catalog: Catalog, filters: Filters) -> dict[bytes, tuple[Predicate, str]]:
    """The distinct predicates with their places in the request, by a digest of what they say."""
    placed = [(predicate, f"filters.where[{number}]") for number, predicate in enumerate(filters.where or ())]
    for number, name in enumerate(filters.named or ()):
        where = f"filters.named[{number}]"
        placed += [(predicate, where) for predicate in catalog.named_filter(name, where)]
    return {_digest(msgspec.json.encode(predicate)): (predicate, where) for predicate, where in placed}


def _meeting(catalog: Catalog, conditions: Mapping[bytes, tuple[Predicate, str]]) -> ItemMask:
    """Items that meet all conditions."""

    def one(key: bytes) -> ItemMask:
        return catalog.masks.get(key, lambda: _evaluate(catalog, *conditions[key]))

    def all_of_them() -> ItemMask:
        return functools.reduce(ItemMask.__and__, map(one, conditions), ItemMask.everything(catalog.num_items))

    if len(conditions) == 1:
        return one(*conditions)
    return catalog.masks.get(_digest(b"".join(sorted(conditions))), all_of_them)


def _evaluate(catalog: Catalog, predicate: Predicate, where: str) -> ItemMask:
    catalog.check_fields([predicate.column], f"{where}.column")
    column = _column(catalog.column, predicate, where)
    return ItemMask.of_bits(catalog.by_row(matches(predicate, column, where)))


def _column(read: Callable[[str], pa.ChunkedArray], predicate: Predicate, where: str) -> pa.ChunkedArray:
    try:
        return read(predicate.column)
    except pa.ArrowException as error:
        raise InvalidRequest(
            f"column {predicate.column!r} has no one type that filters can compare: {error}",
            code="unsupported_column",
            param=f"{where}.column",
        ) from None


def _known(catalog: Catalog, ids: tuple[int | str, ...], field: str, warnings: list[str]) -> np.ndarray:
    """Rows of those that the catalog has, with a warning about the others."""
    rows = catalog.rows_of(ids)
    unknown = np.flatnonzero(rows < 0)
    if unknown.size:
        some = [ids[place] for place in unknown[:5]]
        are = "is" if unknown.size == 1 else "are"
        warnings.append(f"{counted(unknown.size, 'item')} of filters.{field} {are} not in the catalog: {some}")
    return rows[rows >= 0]


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
