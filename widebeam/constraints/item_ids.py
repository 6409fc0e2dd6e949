"""Item ids of a catalog and the way back from an id to its row, without a Python object for each item."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from widebeam.constraints.splice import Splice

INT64 = range(-(2**63), 2**63)


class ItemIds:
    """Ids by row. Integers are one int64 array; anything else is text, with a mark on those declared as integers."""

    def __init__(self, values: np.ndarray | pa.LargeStringArray, is_int: np.ndarray | None = None) -> None:
        self._values = values  # text in one piece: Arrow would put chunks together at every look-up of many rows
        self._is_int = is_int

    @classmethod
    def of(cls, values: list[int | str]) -> ItemIds:
        if all(type(value) is int and value in INT64 for value in values):
            return cls(np.array(values, np.int64))
        return cls._of_text(values)

    @classmethod
    def _of_text(cls, values: Sequence[int | str]) -> ItemIds:
        text = pa.array(map(str, values), pa.large_string(), size=len(values))
        is_int = np.fromiter((type(value) is int for value in values), bool, len(values))
        return cls(text, is_int if is_int.any() else None)

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray) -> ItemIds:
        """From a column of integers or strings without nulls."""
        if not pa.types.is_integer(column.type):
            return cls(column.cast(pa.large_string()).combine_chunks())
        try:
            return cls(column.cast(pa.int64()).to_numpy())
        except pa.ArrowInvalid:  # unsigned ids above 2**63
            return cls(column.cast(pa.large_string()).combine_chunks(), np.ones(len(column), bool))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> int | str:
        if isinstance(self._values, np.ndarray):
            return int(self._values[row])
        text = self._text(row)
        return int(text) if self._is_int is not None and self._is_int[row] else text

    def find(self, item_id: int | str) -> int | None:
        """The row of an id; "42" and 42 are the same id."""
        keys, rows = self._sorted
        if isinstance(self._values, np.ndarray):
            number = _canonical_int(item_id)
            if number is None:
                return None
            at = int(np.searchsorted(keys, number))
            return int(rows[at]) if at < keys.size and keys[at] == number else None
        text = str(item_id)
        key = hash(text)
        at = int(np.searchsorted(keys, key))
        while at < keys.size and keys[at] == key:
            if self._text(rows[at]) == text:
                return int(rows[at])
            at += 1
        return None

    def find_many(self, item_ids: Sequence[int | str]) -> np.ndarray:
        """int32 [ids]; the row of each as `find` has it, -1 for None."""
        keys, rows = self._sorted
        found = np.full(len(item_ids), -1, np.int32)
        wanted, asked = self._keys_of(item_ids)
        by_key = np.argsort(wanted, kind="stable")  # neighbouring searches read the same memory
        wanted, asked = wanted[by_key], asked[by_key]
        at = np.searchsorted(keys, wanted)
        while True:  # once, and again for texts whose hash another has too
            inside = at < keys.size
            inside[inside] = keys[at[inside]] == wanted[inside]
            at, wanted, asked = at[inside], wanted[inside], asked[inside]
            if not at.size:
                return found
            same = self._spelled(rows[at], [item_ids[place] for place in asked.tolist()])
            found[asked[same]] = rows[at[same]]
            at, wanted, asked = at[~same] + 1, wanted[~same], asked[~same]

    def as_kept(self, item_id: int | str) -> int | str | None:
        """A new id as it would be kept; None where all are integers and it is none."""
        return _canonical_int(item_id) if isinstance(self._values, np.ndarray) else item_id

    def updated(self, gone: np.ndarray, ids: Sequence[int | str]) -> ItemIds:
        """With rows of these ids, as they are kept, behind the last. The rows `gone`, each given once, stay where they
        are, but nothing finds them any more. Copies arrays, and looks at no other id."""
        if isinstance(self._values, np.ndarray):
            updated = ItemIds(np.concatenate([self._values, np.array(ids, np.int64)]))
        else:
            further = ItemIds._of_text(ids)
            marked = self._is_int is not None or further._is_int is not None
            is_int = np.concatenate([self._marks, further._marks]) if marked else None
            updated = ItemIds(pa.concat_arrays([self._values, further._values]), is_int)
        keys, rows = self._sorted
        new_keys, new_rows = updated._keyed(len(self))
        splice = Splice.of(keys.size, self._places(gone), np.searchsorted(keys, new_keys))
        updated._sorted = splice.apply(keys, new_keys), splice.apply(rows, new_rows)
        return updated

    def filter(self, keep: np.ndarray) -> ItemIds:
        """Only the rows that `keep`, bool [rows], marks: all that can be found."""
        if isinstance(self._values, np.ndarray):
            kept = ItemIds(self._values[keep])
        else:
            kept = ItemIds(self._values.filter(pa.array(keep)), None if self._is_int is None else self._is_int[keep])
        keys, rows = self._sorted
        kept._sorted = keys, (np.cumsum(keep, dtype=np.int32) - np.int32(1))[rows]
        return kept

    def duplicates(self) -> list[tuple[int, int]]:
        """(row, first row with the same id) for every row whose id was there before, by row."""
        keys, rows = self._sorted
        same = keys[1:] == keys[:-1]
        suspects = np.flatnonzero(np.append(same, False) | np.insert(same, 0, False))
        first: dict[int | str, int] = {}
        found = []
        for row in np.sort(rows[suspects]).tolist():
            earlier = first.setdefault(str(self[row]), row)
            if earlier != row:
                found.append((row, earlier))
        return found

    def matched(self, other: ItemIds) -> tuple[np.ndarray, np.ndarray]:
        """Rows of both that have the same id, of all that can be found. For counting: it takes texts of one 64-bit hash
        for the same."""
        numbers = isinstance(self._values, np.ndarray) and isinstance(other._values, np.ndarray)
        (keys, rows), (others, their_rows) = (one._sorted if numbers else one._hashed for one in (self, other))
        at = np.minimum(np.searchsorted(others, keys), max(others.size - 1, 0))
        same = others[at] == keys
        return rows[same], their_rows[at[same]]

    @property
    def _hashed(self) -> tuple[np.ndarray, np.ndarray]:
        """`_sorted` as if all ids were text."""
        keys, rows = self._sorted
        if not isinstance(self._values, np.ndarray):
            return keys, rows
        hashes = np.fromiter((hash(str(key)) for key in keys.tolist()), np.int64, keys.size)
        order = np.argsort(hashes)
        return hashes[order], rows[order]

    @functools.cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys ascending and their rows: the ids themselves, or Python's 64-bit hash of their text."""
        return self._keyed(0)

    def _keyed(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """The part of `_sorted` that is of rows from `start` on."""
        keys = _keys(self._values[start:])
        order = np.argsort(keys, kind="stable")
        return keys[order], (start + order).astype(np.int32)

    def _places(self, rows: np.ndarray) -> np.ndarray:
        """Where these rows, which can be found, lie in `_sorted`."""
        keys, found = self._sorted
        at = np.searchsorted(keys, _keys(self._values.take(rows)))
        while (other := found[at] != rows).any():  # texts whose hash another has too
            at += other
        return at

    @property
    def _marks(self) -> np.ndarray:
        """bool [rows]; texts that are declared as integers."""
        return np.zeros(len(self), bool) if self._is_int is None else self._is_int

    def _keys_of(self, item_ids: Sequence[int | str]) -> tuple[np.ndarray, np.ndarray]:
        """Keys of those ids that can have one, and their places."""
        if not isinstance(self._values, np.ndarray):
            return np.fromiter(map(hash, map(str, item_ids)), np.int64, len(item_ids)), np.arange(len(item_ids))
        numbers = [_canonical_int(item_id) for item_id in item_ids]
        places = [place for place, number in enumerate(numbers) if number is not None]
        return np.array([numbers[place] for place in places], np.int64), np.array(places, np.int64)

    def _spelled(self, rows: np.ndarray, item_ids: list[int | str]) -> np.ndarray:
        """bool; whether each row, which has the id's key, has the id."""
        if isinstance(self._values, np.ndarray):
            return np.ones(rows.size, bool)
        texts = self._values.take(pa.array(rows)).to_pylist()
        return np.array([text == str(item_id) for text, item_id in zip(texts, item_ids, strict=True)], bool)

    def _text(self, row: int) -> str:
        return str(self._values[int(row)].as_py())


def _keys(values: np.ndarray | pa.LargeStringArray) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else np.fromiter(_hashes(values), np.int64, len(values))


def _hashes(column: pa.LargeStringArray, batch: int = 1 << 16) -> Iterator[int]:
    for start in range(0, len(column), batch):
        yield from map(hash, column.slice(start, batch).to_pylist())


def _canonical_int(item_id: int | str) -> int | None:
    """The 64-bit integer that an id is or spells in the usual way ("42", not "042"), else None."""
    if isinstance(item_id, str):
        digits = item_id.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 19 and str(int(item_id)) == item_id):
            return None
        item_id = int(item_id)
    return item_id if item_id in INT64 else None
