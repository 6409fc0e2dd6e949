"""What a catalog looks like: the numbers behind `widebeam catalog inspect`."""

from __future__ import annotations

import msgspec
import numpy as np

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.header import Marker, Order, SidForm
from widebeam.constraints.index import CatalogIndex
from widebeam.constraints.template import HistoryTemplate
from widebeam.faults import counted


class LevelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One level of the prefix tree."""

    codebook_size: int
    codebook_declared: bool
    """By the header; otherwise it is the codes in use."""
    codes_in_use: int
    codes_unused: int
    nodes: int
    """Distinct prefixes of this length."""
    mean_children: float
    """Nodes of this level under a node one level up, over those that have any."""
    min_children: int
    median_children: int
    p99_children: int
    max_children: int


class Collisions(msgspec.Struct, frozen=True, kw_only=True):
    """How items share SIDs."""

    shared_sids: int
    """SIDs of several items."""
    shared_items: int
    """Items that share their SID with another."""
    largest: int
    """Items of the SID that has most."""
    items_per_sid: dict[int, int]
    """Number of items -> SIDs that have as many."""

    @classmethod
    def of(cls, index: CatalogIndex) -> Collisions:
        sids_with = np.bincount(index.num_terminal)
        several = np.arange(sids_with.size) > 1
        return cls(
            shared_sids=int(sids_with[several].sum()),
            shared_items=int((sids_with * np.arange(sids_with.size))[several].sum()),
            largest=sids_with.size - 1,
            items_per_sid={items: int(sids_with[items]) for items in np.flatnonzero(sids_with).tolist() if items},
        )

    def text(self) -> str:
        if not self.shared_sids:
            return "every item has a SID of its own"
        parts: dict[str, int] = {}
        for items, sids in self.items_per_sid.items():
            low = 1 << (items.bit_length() - 1)  # SIDs of 4 to 7 items together, of 8 to 15, ..
            name = f"{items}" if items < 4 else f"{low}-{2 * low - 1}"
            parts[name] = parts.get(name, 0) + sids
        shares = ", ".join(f"{sids:,} of {name}" for name, sids in parts.items())
        return (
            f"{self.shared_items:,} items share {counted(self.shared_sids, 'SID', ',')}, at most {self.largest:,} the "
            f"same; SIDs by number of items: {shares}"
        )


class CatalogReport(msgspec.Struct, frozen=True, kw_only=True):
    """A catalog in numbers."""

    name: str
    format: str
    header: str | None
    """Where the header was found."""
    version: int | None
    """As the header declares it."""
    sid: SidForm
    sid_declared: bool
    """By the header; otherwise detected."""
    begin: Marker | None
    """Token in front of every SID, as the header declares it."""
    end: Marker | None
    resolved: bool
    """False: token strings were not looked up in a tokenizer."""
    items: int
    sids: int
    """Distinct SIDs."""
    collisions: Collisions
    max_items_per_sid: int | None
    """The header's limit on what is returned of one SID."""
    levels: list[LevelReport]
    depths: dict[int, int]
    """Items by the length of their SID."""
    fields: tuple[str, ...]
    order: Order | None
    template: HistoryTemplate | None
    filters: tuple[str, ...]
    """Named ones."""
    index_bytes: int
    """On the host."""
    device_bytes: int
    """On the device: of --catalog-memory-gib, and the codebooks."""
    load_s: float | None
    """Seconds to read, check and index the file."""
    warnings: tuple[str, ...]
    """What may be other than meant."""

    def text(self) -> str:
        """The report for people: lines of a label and its facts, then a table of levels."""
        order = "the file's order"
        if self.order is not None:
            order = f"by {self.order.column}, {'descending' if self.order.descending else 'ascending'}"
        around = [f"{name} {token}" for name, token in (("begin", self.begin), ("end", self.end)) if token is not None]
        known = "; ".join(["", *around, *([] if self.resolved else ["not looked up in a tokenizer"])])
        if self.max_items_per_sid is not None:
            order += f", of which at most {self.max_items_per_sid:,} are returned"
        declared = "" if self.version is None else f"; version {self.version}"
        loaded = "" if self.load_s is None else f"; loaded in {self.load_s:.2f} s"
        lines = [
            ("catalog", f"{self.name} ({self.format}; header: {self.header or 'none'}){declared}"),
            ("sids", f"{self.sid} ({'declared' if self.sid_declared else 'detected'}){known}"),
            ("items", f"{self.items:,} under {counted(self.sids, 'SID', ',')}"),
            ("shared", self.collisions.text()),
            ("depth", ", ".join(f"{depth} ({counted(items, 'item', ',')})" for depth, items in self.depths.items())),
            ("order", f"within a SID: {order}"),
            ("fields", ", ".join(self.fields) or "none"),
            ("template", repr(self.template.item) if self.template is not None else "none"),
            ("filters", ", ".join(self.filters) or "none"),
            ("index", f"{self.index_bytes:,} bytes{loaded}"),
            ("device", f"{self.device_bytes:,} bytes"),
            *(("warning", text) for text in self.warnings),
        ]
        return "\n".join([f"{label:<9} {fact}" for label, fact in lines] + self._table())

    def _table(self) -> list[str]:
        head = f"{'level':>5} {'codebook':>18} {'in use':>9} {'unused':>9} {'nodes':>11}"
        table = [f"{head} {'children: mean':>15} {'min':>5} {'median':>7} {'p99':>7} {'max':>7}"]
        for number, level in enumerate(self.levels):
            book = f"{level.codebook_size:,} {'declared' if level.codebook_declared else 'in use'}"
            table.append(
                f"{number:>5} {book:>18} {level.codes_in_use:>9,} {level.codes_unused:>9,} {level.nodes:>11,} "
                f"{level.mean_children:>15,.1f} {level.min_children:>5,} {level.median_children:>7,} "
                f"{level.p99_children:>7,} {level.max_children:>7,}"
            )
        return table


def inspect(catalog: Catalog, *, load_s: float | None = None) -> CatalogReport:
    """Measure a catalog."""
    from widebeam.constraints.arena import device_bytes

    index = catalog.index
    per_sid = index.num_terminal
    depths = {
        depth: int(per_sid[slice(*index.level_start[depth : depth + 2])].sum()) for depth in range(1, index.depth + 1)
    }
    return CatalogReport(
        name=catalog.name,
        format=catalog.format,
        header=catalog.header_place,
        version=catalog.header.version,
        sid=catalog.sid_form,
        sid_declared=catalog.header.sid is not None,
        begin=catalog.header.begin,
        end=catalog.header.end,
        resolved=catalog.resolved,
        items=catalog.num_items,
        sids=catalog.num_sids,
        collisions=Collisions.of(index),
        max_items_per_sid=catalog.header.max_items_per_sid,
        levels=[_level(catalog, level) for level in range(index.depth)],
        depths={depth: items for depth, items in depths.items() if items},
        fields=catalog.fields,
        order=catalog.header.order,
        template=catalog.template,
        filters=tuple(catalog.header.filters),
        index_bytes=index.nbytes,
        device_bytes=device_bytes(catalog),
        load_s=load_s,
        warnings=catalog.warnings,
    )


def _level(catalog: Catalog, level: int) -> LevelReport:
    index, book = catalog.index, catalog.codebooks[level]
    first, last = index.level_start[level : level + 2]
    children = np.diff(index.first_child[first : last + 1])
    children = children[children > 0]
    codes = index.code[slice(*index.level_start[level + 1 : level + 3])]
    in_use = int(np.count_nonzero(np.bincount(codes)))
    return LevelReport(
        codebook_size=book.token_ids.size,
        codebook_declared=book.declared,
        codes_in_use=in_use,
        codes_unused=book.token_ids.size - in_use,
        nodes=codes.size,
        mean_children=float(children.mean()),
        min_children=int(children.min()),
        median_children=int(np.quantile(children, 0.5, method="higher")),
        p99_children=int(np.quantile(children, 0.99, method="higher")),
        max_children=index.max_fanout(level),
    )
