"""One version of a catalog: its items, their SIDs and the index over them."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from widebeam.constraints import formats
from widebeam.constraints.codebooks import Codebook, Vocabulary
from widebeam.constraints.filter_spec import Predicate
from widebeam.constraints.filters import MaskCache, check_named
from widebeam.constraints.header import Header, HeaderMismatch, SidForm, base_name
from widebeam.constraints.index import CatalogIndex, sort_order
from widebeam.constraints.item_ids import ItemIds
from widebeam.constraints.markers import Markers, without_markers
from widebeam.constraints.order import declared_order, rank_of
from widebeam.constraints.rows import Metadata, Problems, Rows
from widebeam.constraints.sid_codes import encode_sids, sid_form
from widebeam.constraints.template import HistoryTemplate
from widebeam.engine.request import NO_CATALOG
from widebeam.errors import CatalogError, InvalidRequest


@dataclass(frozen=True, eq=False)
class Catalog:
    """One immutable version of a catalog. Rows are items sorted by SID, in declared order within one SID."""

    name: str
    version: int
    index: CatalogIndex = field(repr=False)
    codebooks: list[Codebook] = field(repr=False)
    """One for each level; `index.code` is a place in it."""
    header: Header
    header_place: str | None
    """Where the header was found; None: there is none, and all of it is default."""
    sid_form: SidForm
    """What the file's SIDs are, declared or detected."""
    markers: Markers
    """Tokens around a SID. They are part of no path."""
    format: str
    """jsonl, parquet, minionerec or sid2pid."""
    sid_lengths: frozenset[int]
    """Levels of SIDs, when the catalog was loaded."""
    source: str
    """Where it came from, in words."""
    made_at: float
    """Unix time in seconds."""
    _ids: ItemIds = field(repr=False)
    _metadata: Metadata = field(repr=False)
    _codes: np.ndarray = field(repr=False)
    """int32 [depth, items]; the codes along each item's path, -1 behind a shorter SID."""
    _order: np.ndarray = field(repr=False)
    """int64 [items]; row -> file row. Updates add file rows behind those of the file and leave others without item."""
    _rank: np.ndarray = field(repr=False)
    """int32 [file rows]; file row -> row, -1 where no item is left."""
    _place: np.ndarray = field(repr=False)
    """int64 [file rows]; the order of items that nothing else orders: the file's, then that of their coming."""
    masks: MaskCache = field(init=False, repr=False, default_factory=MaskCache)
    """Of items that meet conditions. Every version has its own."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        name: str | None = None,
        shown: str | None = None,
        token_id: Callable[[str], int | None] | None = None,
        vocab_size: int | None = None,
        inherited: Header | None = None,
    ) -> Catalog:
        """Read, check and index a catalog file: parquet, JSONL, MiniOneRec index.json or packed sid2pid JSON.

        `name` is by default the file's name without its ending. `shown` is what messages call the file, by default its
        name; what lies beside it is called alike. `token_id` gives the id of a token string; without
        it, token strings get made-up ids and the catalog is not `resolved`. Token ids from `vocab_size` up are
        refused. `inherited` is the header of a file that has none inside. Raises CatalogError, whose `problems` name
        file, line and reason.
        """
        path = Path(path)
        name = base_name(path) if name is None else name
        if name == NO_CATALOG:
            raise CatalogError(f"a catalog cannot be named {NO_CATALOG!r}, by which requests ask for no constraint")
        shown = path.name if shown is None else shown
        rows, header, place = formats.read(path, shown, inherited)
        problems = Problems(shown)
        _check_unique(rows, problems)
        try:
            vocabulary = Vocabulary(token_id, vocab_size)
            form = sid_form(rows, header)
            rows = without_markers(rows, form, header, vocabulary, problems)
            codes, codebooks = encode_sids(rows, header, vocabulary, problems)
            problems.check()
            markers = Markers.of(header, vocabulary, codebooks)
            _check_columns(header, rows.metadata.fields)
            first = declared_order(header, rows.metadata.column)
            check_named(header.filters, rows.metadata)
        except InvalidRequest as error:
            raise CatalogError(f"{place}: {error.param}: {error}") from None
        except HeaderMismatch as error:
            raise CatalogError(f"{place or shown}: {error}") from None
        order = sort_order(codes if first is None else codes[first])
        order = order if first is None else first[order]
        sorted_codes = np.ascontiguousarray(codes[order].T)
        return cls(
            name=name,
            version=1,
            index=CatalogIndex.of_sorted(sorted_codes),
            codebooks=codebooks,
            header=header,
            header_place=place,
            sid_form=form,
            markers=markers,
            format=rows.format,
            sid_lengths=frozenset(np.unique(rows.lengths).tolist()),
            source=path.name,
            made_at=time.time(),
            _ids=rows.ids,
            _metadata=rows.metadata,
            _codes=sorted_codes,
            _order=order,
            _rank=rank_of(order, order.size),
            _place=np.arange(order.size),
        )

    @property
    def depth(self) -> int:
        """Levels of the longest SID."""
        return self.index.depth

    @property
    def num_items(self) -> int:
        return self.index.num_items

    @property
    def num_sids(self) -> int:
        """Distinct SIDs."""
        return self.index.num_sids

    @property
    def level_token_ids(self) -> list[np.ndarray]:
        """Per level, the codebook as ascending token ids: int64 [C]. `index.code` is a place in it."""
        return [book.token_ids for book in self.codebooks]

    @property
    def resolved(self) -> bool:
        """Token ids are those of a tokenizer, or were given as such. Only such a catalog can be searched."""
        return self.markers.resolved and all(book.resolved for book in self.codebooks)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may be other than meant."""
        if self.sid_form == "token_ids" and self.header.sid is None:
            return (
                "SIDs are integers, and no header says what they are: they are taken for token ids of the model. "
                'If they are, say "sid": "token_ids" in the header; if they are codes, its `levels` map them to tokens',
            )
        return ()

    @property
    def fields(self) -> tuple[str, ...]:
        """Metadata columns."""
        return self._metadata.fields

    @property
    def template(self) -> HistoryTemplate | None:
        return self.header.template

    def row_of(self, item_id: str | int) -> int | None:
        """The row of an item; "42" and 42 name the same one. None if the catalog does not have it."""
        file_row = self._ids.find(item_id)
        return None if file_row is None else int(self._rank[file_row])

    def rows_of(self, item_ids: Sequence[str | int]) -> np.ndarray:
        """int32 [ids]; the row of each item, -1 for those that the catalog does not have."""
        file_rows = self._ids.find_many(item_ids)
        return np.where(file_rows < 0, np.int32(-1), self._rank[file_rows])

    def item_id(self, row: int) -> int | str:
        """The id of an item, of the type that the file gives it."""
        return self._ids[int(self._order[row])]

    def sid(self, row: int) -> list[int | str]:
        """The SID of an item, as the file writes it."""
        return [
            value if isinstance(value := book.values[code], str) else int(value)
            for book, code in zip(self.codebooks, self._path(row), strict=False)
        ]

    def token_ids(self, row: int) -> list[int]:
        """The SID of an item as token ids."""
        return [int(book.token_ids[code]) for book, code in zip(self.codebooks, self._path(row), strict=False)]

    def items_at(self, node: int) -> range:
        """Rows of the items under exactly the SID that a node of the index spells, in declared order."""
        start = int(self.index.item_lo[node])
        return range(start, start + int(self.index.num_terminal[node]))

    def metadata(self, row: int, fields: Sequence[str]) -> dict[str, Any]:
        """Values of metadata columns, None where an item has none."""
        return self._metadata.get(int(self._order[row]), fields) if fields else {}

    def column(self, field: str) -> pa.ChunkedArray:
        """One metadata column, by file row. Raises pa.ArrowInvalid when its values are of mixed types."""
        return self._metadata.column(field)

    def by_row(self, values: np.ndarray) -> np.ndarray:
        """Values by file row, by row."""
        return values.take(self._order)

    def named_filter(self, name: str, param: str) -> tuple[Predicate, ...]:
        """What the header declares under a name. Raises InvalidRequest; `param` is where the request names it."""
        declared = self.header.filters
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise InvalidRequest(
                f"catalog {self.name!r} has no filter {name!r}{hint(name, declared)}; it has: {known}",
                code="unknown_filter",
                param=param,
            )
        return declared[name]

    def check_fields(self, fields: Sequence[str], param: str = "fields") -> None:
        """Raise InvalidRequest for a metadata column that the catalog does not have."""
        for name in fields:
            if name not in self.fields:
                known = ", ".join(self.fields) or "none"
                raise InvalidRequest(
                    f"catalog {self.name!r} has no metadata column {name!r}{hint(name, self.fields)}; it has: {known}",
                    code="unknown_field",
                    param=param,
                )

    def _path(self, row: int) -> list[int]:
        return [code for code in self._codes[:, row].tolist() if code >= 0]


def _check_unique(rows: Rows, problems: Problems) -> None:
    for row, earlier in rows.ids.duplicates():
        text = f"{rows.where(row)}: item {rows.ids[row]!r} is there twice, first at {rows.where(earlier)}"
        problems.add(row, text)


def _check_columns(header: Header, columns: tuple[str, ...]) -> None:
    """Raise HeaderMismatch for a column that the header names and the file lacks."""
    named = [("order.column", header.order.column)] if header.order is not None else []
    if header.template is not None:
        named += [("template.item", column) for column in header.template.columns]
    for name, predicates in header.filters.items():
        named += [(f"filters.{name}[{number}].column", one.column) for number, one in enumerate(predicates)]
    for place, column in named:
        if column not in columns:
            known = ", ".join(columns) or "none"
            raise HeaderMismatch(f"{place}: no metadata column {column!r}{hint(column, columns)}; there are: {known}")


def hint(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
