"""Read catalogs from JSON: native JSONL, MiniOneRec's index.json, packed sid2pid."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from widebeam.constraints.header import Header, beside
from widebeam.constraints.item_ids import ItemIds
from widebeam.constraints.rows import RESERVED, ArrowColumns, JsonObjects, Problems, Rows
from widebeam.errors import CatalogError
from widebeam.faults import why_no_json

PACKED_BASE, PACKED_LEVELS = 8192, 3
PACKED_HEADER = (
    "packed SIDs do not say which tokens they are: put a header, NAME.catalog.json or catalog.json, beside the file; "
    'its `levels` map codes to tokens and have 3 entries, each {"token": "<a_{code}>", "codes": 8192} or '
    '{"first_token_id": 151669, "codes": 8192}'
)


def read_jsonl(path: Path, name: str) -> Rows:
    """A JSON object for each line: `item_id`, `sid`, any other keys as metadata. Blank lines are skipped.

    Raises CatalogError that lists each bad line.
    """
    text = path.read_bytes()
    view = memoryview(text)
    decode = msgspec.json.Decoder(dict).decode
    collector, problems = Collector(), Problems(name)
    starts = array("q")
    fields: dict[str, None] = {}
    begin = number = 0
    while begin < len(text):
        end = text.find(b"\n", begin)
        end = len(text) if end < 0 else end
        number += 1
        try:
            if text[begin:end].strip():
                row = decode(view[begin:end])
                collector.add(row.get("item_id"), row.get("sid"))
                starts.append(begin)
                if not row.keys() <= fields.keys():
                    fields |= dict.fromkeys(row)
        except (msgspec.DecodeError, RecursionError) as error:
            problems.add(number, f"{name}:{number}: not a JSON object: {why_no_json(error, text[begin:end])}")
        except BadRow as error:
            problems.add(number, f"{name}:{number}: {error}")
        begin = end + 1
    problems.check()
    offsets = np.append(np.array(starts, np.int64), len(text))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(text)]
    objects = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(starts), buffers)
    metadata = JsonObjects(pa.chunked_array([objects]), fields)

    def where(row: int) -> str:
        line = text.count(b"\n", 0, offsets[row]) + 1
        return f"{name}:{line}"

    return Rows("jsonl", *collector.columns(), metadata, where)


def read_json(path: Path, header: Header, name: str) -> Rows:
    """A MiniOneRec index (by its name `*.index.json`, or because values are lists of strings) or packed sid2pid."""
    entries = _load_object(path, name)
    first = next(iter(entries.values()), None)
    has_tokens = isinstance(first, list) and bool(first) and isinstance(first[0], str)
    if path.name.endswith(".index.json") or (has_tokens and not path.name.startswith("sid2")):
        return _minionerec(path, entries, name)
    return _sid2pid(entries, header, name)


def _minionerec(path: Path, entries: dict[str, Any], name: str) -> Rows:
    """Item -> list of SID tokens, with the metadata of a sibling `*.item.json` (item -> object) if there is one."""
    collector, problems = Collector(), Problems(name)
    for number, (item_id, sid) in enumerate(entries.items()):
        try:
            collector.add(item_id, sid)
        except BadRow as error:
            problems.add(number, f"{name}: {error}")
    sibling = path.with_name(path.name.removesuffix(".index.json") + ".item.json")
    other = beside(name, sibling.name)
    objects = _load_object(sibling, other) if sibling.is_file() else {}
    for number, (item_id, one) in enumerate(objects.items(), len(entries)):
        if item_id not in entries:
            problems.add(number, f"{other}: item {item_id!r} has no sid in {name}")
        elif not isinstance(one, dict):
            problems.add(number, f"{other}: item {item_id!r}: metadata must be an object, not {_name(one)}")
        elif not one.keys().isdisjoint(RESERVED):
            problems.add(number, f"{other}: item {item_id!r}: a column cannot be called item_id or sid")
    problems.check()
    metadata = JsonObjects.of([objects.get(item_id, {}) for item_id in entries])
    return Rows("minionerec", *collector.columns(), metadata, lambda row: name)


def _sid2pid(entries: dict[str, Any], header: Header, name: str) -> Rows:
    """a * 8192**2 + b * 8192 + c in decimal -> an item id or a list of item ids, in the order they are to be returned.

    OpenOneRec's tokens, for example, are levels of 8192 codes from token ids 151669, 159861 and 168053.
    """
    if header.levels is None or len(header.levels) != PACKED_LEVELS or header.sid not in (None, "codes"):
        raise CatalogError(f"{name}: {PACKED_HEADER}")
    problems = Problems(name)
    ids: list[int | str] = []
    packed, counts = array("q"), array("q")
    for number, (key, value) in enumerate(entries.items()):
        items = value if isinstance(value, list) else [value]
        bad = next((item for item in items if type(item) not in (int, str) or item == ""), None)
        if not (key.isascii() and key.isdigit() and len(key) <= 12 and int(key) < PACKED_BASE**PACKED_LEVELS):
            problems.add(number, f"{name}: key {key!r} is not a packed SID: a number from 0 to 8192**3 - 1")
        elif items in ([], [None]):
            problems.add(number, f"{name}: key {key!r} has no items")
        elif bad is not None or None in items:
            problems.add(
                number,
                f"{name}: key {key!r} must give an item id or a list of item ids, but holds {_name(bad)}",
            )
        else:
            ids += items
            packed.append(int(key))
            counts.append(len(items))
    problems.check()
    keys = np.repeat(np.array(packed), np.array(counts))
    codes = np.stack([keys // PACKED_BASE**2, keys // PACKED_BASE % PACKED_BASE, keys % PACKED_BASE], axis=1)
    lengths = np.full(len(ids), PACKED_LEVELS)
    no_metadata = ArrowColumns(pa.table({}))

    def where(row: int) -> str:
        return f"{name}: key '{keys[row]}'"

    return Rows("sid2pid", ItemIds.of(ids), lengths, codes.ravel(), None, no_metadata, where)


class BadRow(Exception):
    """What is wrong with one item."""


class Collector:
    """Checks items one by one and keeps them as flat arrays."""

    def __init__(self) -> None:
        self._ids: list[int | str] = []
        self._lengths, self._values = array("q"), array("q")
        self._tokens: dict[str, int] = {}
        self._kind: type | None = None

    def add(self, item_id: Any, sid: Any) -> None:
        """Raises BadRow and keeps nothing of a bad item."""
        if item_id is None or item_id == "":
            raise BadRow("item_id is missing" if item_id is None else "item_id is empty")
        if type(item_id) not in (int, str):
            raise BadRow(f"item_id must be a string or an integer, not {_name(item_id)}")
        if sid is None or sid in ([], ""):
            raise BadRow(f"item {item_id!r} has no sid")
        kinds = set(map(type, sid)) if isinstance(sid, list) else set()
        if kinds not in ({int}, {str}):
            raise BadRow(f"item {item_id!r}: sid must be a list of integers or a list of strings, not {_name(sid)}")
        kind = kinds.pop()
        if kind is not (self._kind or kind):
            raise BadRow(f"item {item_id!r}: sid holds {_PLURAL[kind]}, those before it {_PLURAL[self._kind]}")
        if kind is str:
            numbers = array("q", [self._tokens.setdefault(token, len(self._tokens)) for token in sid])
        else:
            try:
                numbers = array("q", sid)
            except OverflowError:
                raise BadRow(f"item {item_id!r}: sid holds an integer of more than 64 bits") from None
        self._kind = kind
        self._ids.append(item_id)
        self._lengths.append(len(sid))
        self._values += numbers

    def columns(self) -> tuple[ItemIds, np.ndarray, np.ndarray, list[str] | None]:
        """Ids, lengths, values and tokens, as `Rows` has them."""
        tokens = list(self._tokens) if self._kind is str else None
        return ItemIds.of(self._ids), np.array(self._lengths), np.array(self._values), tokens


_PLURAL: dict[type | None, str] = {int: "integers", str: "strings"}


def _name(value: Any) -> str:
    """A value as JSON, cut to what fits in a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _load_object(path: Path, name: str) -> dict[str, Any]:
    """A whole JSON file whose top is an object.

    Decoded twice: msgspec is strict (no NaN, no broken Unicode), the standard decoder shows keys that are there twice.
    """
    problems = Problems(name)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            for number, (key, count) in enumerate(Counter(key for key, _ in pairs).items()):
                if count > 1:
                    problems.add(number, f"{name}: {key!r} is there twice")
        return entries

    text = path.read_bytes()
    try:
        msgspec.json.decode(text)
        entries = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{name}: not JSON: {why_no_json(error, text)}") from None
    problems.check()
    if not isinstance(entries, dict):
        raise CatalogError(f"{name}: a .json catalog is one object; name a file of one object a line .jsonl")
    return entries
