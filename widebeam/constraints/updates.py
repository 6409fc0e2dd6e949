"""The next version of a catalog from the one before and a batch of changed items.

Everything is patched: places are found by binary search among the sorted paths, arrays are copied without what goes and
with what comes. Only the index is made anew, from codes that are sorted already. Time is linear in the catalog, at the
speed of memory; Python looks at changed items alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.codebooks import Vocabulary
from widebeam.constraints.filter_spec import MAX_ID_LENGTH
from widebeam.constraints.filters import check_named
from widebeam.constraints.header import HeaderMismatch
from widebeam.constraints.index import CatalogIndex, sort_order
from widebeam.constraints.json_files import BadRow, Collector
from widebeam.constraints.markers import without_markers
from widebeam.constraints.order import declared_order, rank_of
from widebeam.constraints.rows import RESERVED, Metadata, Problems, Rows
from widebeam.constraints.sid_codes import encode_sids
from widebeam.constraints.splice import Splice, equal_ranges
from widebeam.errors import CatalogError, InvalidRequest
from widebeam.faults import counted

Row = Mapping[str, Any]
_LEFT_BEHIND = 4
"""File rows without an item are cleared away once they are more than one for so many items."""


def updated(catalog: Catalog, upsert: Iterable[Row], remove: Sequence[int | str], vocabulary: Vocabulary) -> Catalog:
    """The catalog with some items added or replaced and others removed; its version number is still the same.

    A row of `upsert` is an item as in a JSONL file, whole: what it leaves out is null. An item that is there already
    keeps its place among those that nothing orders; a new one comes last. Codebooks stay as they are. Raises
    InvalidRequest that names the row.
    """
    batch = _read(catalog, upsert, remove)
    codes = _encode(catalog, batch, vocabulary)
    metadata = catalog._metadata.updated(batch.gone, batch.objects)
    try:
        check_named(catalog.header.filters, metadata)
        splice, file_rows, changed = _arrange(catalog, batch, codes, metadata)
    except HeaderMismatch as error:
        raise InvalidRequest(str(error), code="type_mismatch", param="upsert") from None
    sorted_codes = np.empty((catalog.depth, splice.size), np.int32)
    for old, new, out in zip(catalog._codes, changed, sorted_codes, strict=True):
        splice.apply(old, new, out)
    if (sorted_codes[-1] < 0).all():
        raise InvalidRequest(
            f"no SID of {counted(catalog.depth, 'level')} would be left: load another catalog",
            code="depth_mismatch",
            param="remove",
        )
    order = splice.apply(catalog._order, file_rows)
    return _compact(
        replace(
            catalog,
            index=CatalogIndex.of_sorted(sorted_codes),
            source=f"update of version {catalog.version}",
            made_at=time.time(),
            _ids=catalog._ids.updated(batch.gone, batch.ids),
            _metadata=metadata,
            _codes=sorted_codes,
            _order=order,
            _rank=rank_of(order, batch.places.size),
            _place=batch.places,
        )
    )


@dataclass(frozen=True, eq=False)
class _Batch:
    """What changes, checked but for SIDs and metadata. A row that comes is a file row behind those of before."""

    ids: list[int | str]
    """Of rows that come, as they are kept."""
    rows: Rows | None
    """Their SIDs; None: none come."""
    objects: list[Row]
    """Their metadata."""
    gone: np.ndarray
    """int64; file rows that go, because items are removed or replaced."""
    places: np.ndarray
    """int64; the catalog's `_place` afterwards."""


def _read(catalog: Catalog, upsert: Iterable[Row], remove: Sequence[int | str]) -> _Batch:
    collector, objects = Collector(), []
    named: dict[str, str] = {}
    ids: list[int | str] = []

    def name_once(item_id: int | str, where: str) -> None:
        earlier = named.setdefault(str(item_id), where)
        if earlier != where:
            raise InvalidRequest(
                f"{where}: item {item_id!r} is there twice, first as {earlier}", code="duplicate_item", param=where
            )

    fields = {*catalog.fields, *RESERVED}
    for number, row in enumerate(upsert):
        where = f"upsert[{number}]"
        try:
            item_id: Any = row.get("item_id")
            collector.add(item_id, row.get("sid"))
        except BadRow as error:
            raise InvalidRequest(f"{where}: {error}", code="invalid_item", param=where) from None
        name_once(item_id, where)
        for field in row.keys() - fields:
            try:
                catalog.check_fields([field], f"{where}.{field}")
            except InvalidRequest as error:
                raise InvalidRequest(f"{where}: {error}", code=error.code, param=error.param) from None
        ids.append(item_id)
        objects.append(row)
    for number, item_id in enumerate(remove):
        name_once(item_id, f"remove[{number}]")
    if not named:
        raise InvalidRequest("there is nothing to change: give upsert, remove or both", param="upsert")
    known, removed = catalog._ids.find_many(ids).astype(np.int64), catalog._ids.find_many(remove).astype(np.int64)
    if (removed < 0).any():
        place = int(np.argmax(removed < 0))
        raise InvalidRequest(
            f"remove[{place}]: catalog {catalog.name!r} has no item {remove[place]!r}",
            code="unknown_item",
            param=f"remove[{place}]",
        )
    gone = np.concatenate([known[known >= 0], removed])
    if catalog.num_items - gone.size + len(ids) == 0:
        raise InvalidRequest("no item would be left: a catalog has at least one", code="empty_catalog", param="remove")
    kept = [
        catalog._ids[row] if row >= 0 else _new_id(catalog, item_id, f"upsert[{number}]")
        for number, (item_id, row) in enumerate(zip(ids, known.tolist(), strict=True))
    ]
    last = catalog._place.max() + 1
    places = np.where(known < 0, last + np.arange(known.size), catalog._place[known])
    rows = _rows(catalog, collector) if objects else None
    return _Batch(kept, rows, objects, gone, np.concatenate([catalog._place, places]))


def _new_id(catalog: Catalog, item_id: int | str, where: str) -> int | str:
    kept = catalog._ids.as_kept(item_id)
    if kept is None:
        raise InvalidRequest(
            f"{where}.item_id: item ids of catalog {catalog.name!r} are 64-bit integers, which {item_id!r} is not",
            code="invalid_item",
            param=f"{where}.item_id",
        )
    if len(str(kept)) > MAX_ID_LENGTH:
        raise InvalidRequest(
            f"{where}.item_id has {len(str(kept))} characters; the limit is {MAX_ID_LENGTH}",
            code="invalid_item",
            param=f"{where}.item_id",
        )
    return kept


def _rows(catalog: Catalog, collector: Collector) -> Rows:
    """The batch as a file of its own, whose SIDs are of the form that the catalog has."""
    ids, lengths, values, tokens = collector.columns()
    rows = Rows("jsonl", ids, lengths, values, tokens, catalog._metadata, lambda row: f"upsert[{row}]")
    if (tokens is not None) != (catalog.sid_form == "tokens"):
        given = "integers" if tokens is None else "strings"
        raise InvalidRequest(
            f"upsert[0].sid: SIDs of catalog {catalog.name!r} are {catalog.sid_form}, not {given}",
            code="invalid_item",
            param="upsert[0].sid",
        )
    return rows


def _encode(catalog: Catalog, batch: _Batch, vocabulary: Vocabulary) -> np.ndarray:
    """int32 [depth, rows that come] places in the codebooks."""
    if batch.rows is None:
        return np.zeros((catalog.depth, 0), np.int32)
    problems = Problems("upsert")
    try:
        rows = without_markers(batch.rows, catalog.sid_form, catalog.header, vocabulary, problems)
        _check_lengths(catalog, rows.lengths)
        codes, _ = encode_sids(rows, catalog.header, vocabulary, problems, catalog.codebooks)
        problems.check()
    except CatalogError as error:
        where = re.match(r"upsert\[\d+\]", error.problems[0])
        param = f"{where[0]}.sid" if where else "upsert"
        raise InvalidRequest(str(error), code="invalid_item", param=param) from None
    return np.ascontiguousarray(codes.T)


def _check_lengths(catalog: Catalog, lengths: np.ndarray) -> None:
    """Raise InvalidRequest for a SID of a length that those of the catalog's file do not have."""
    wrong = np.flatnonzero(~np.isin(lengths, list(catalog.sid_lengths)))
    if wrong.size:
        row = int(wrong[0])
        known = " or ".join(map(str, sorted(catalog.sid_lengths)))
        raise InvalidRequest(
            f"upsert[{row}].sid has {counted(lengths[row], 'level')}; SIDs of catalog {catalog.name!r} have {known}",
            code="depth_mismatch",
            param=f"upsert[{row}].sid",
        )


def _arrange(
    catalog: Catalog, batch: _Batch, codes: np.ndarray, metadata: Metadata
) -> tuple[Splice, np.ndarray, np.ndarray]:
    """What happens to the sorted rows; then file row and codes, [depth, rows], of each row that it puts in.

    All items of a SID that gets one are taken out and put in again, in order.
    """
    gone = catalog._rank[batch.gone]
    lo, hi = equal_ranges(catalog._codes, codes)
    shared, their_lo = _members(lo, hi)
    stays = ~np.isin(shared, gone)
    shared, their_lo = shared[stays], their_lo[stays]
    file_rows = np.concatenate([catalog._order[shared], catalog._rank.size + np.arange(lo.size)])
    changed = np.concatenate([catalog._codes[:, shared], codes], axis=1)
    order = np.argsort(batch.places[file_rows])
    if order.size:
        declared = declared_order(catalog.header, lambda field: metadata.column(field).take(file_rows[order]))
        order = order if declared is None else order[declared]
        order = order[sort_order(changed[:, order].T)]
    at = np.concatenate([their_lo, lo])
    splice = Splice.of(catalog.num_items, np.concatenate([gone, shared]), at[order])
    return splice, file_rows[order], changed[:, order]


def _members(lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that some of the ranges lo .. hi - 1 hold, which are equal or apart, and the `lo` of each."""
    lo, hi = np.unique(np.stack([lo, hi])[:, hi > lo], axis=1)
    sizes = hi - lo
    starts = np.cumsum(sizes) - sizes
    return np.repeat(lo - starts, sizes) + np.arange(sizes.sum()), np.repeat(lo, sizes)


def _compact(catalog: Catalog) -> Catalog:
    """The same, without file rows that have no item if those are many."""
    if (catalog._rank.size - catalog.num_items) * _LEFT_BEHIND <= catalog.num_items:
        return catalog
    keep = catalog._rank >= 0
    return replace(
        catalog,
        _ids=catalog._ids.filter(keep),
        _metadata=catalog._metadata.filter(keep),
        _order=(np.cumsum(keep) - 1)[catalog._order],
        _rank=catalog._rank[keep],
        _place=catalog._place[keep],
    )
