"""What a catalog looks like: the numbers behind `widebeam catalog inspect` and `validate`."""

from __future__ import annotations

import msgspec
import numpy as np

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.header import Order, SidForm
from widebeam.constraints.template import HistoryTemplate


class LevelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One level of the prefix tree."""

    codebook_size: int
    codebook_declared: bool
    """By the header; otherwise it is the codes in use."""
    codes_in_use: int
    nodes: int
    """Distinct prefixes of this length."""
    mean_children: float
    """Nodes of this level under a node one level up, over those that have any."""
    max_children: int


class CatalogReport(msgspec.Struct, frozen=True, kw_only=True):
    """A catalog in numbers."""

    name: str
    format: str
    header: str | None
    """Where the header was found."""
    sid: SidForm
    sid_declared: bool
    """By the header; otherwise detected."""
    resolved: bool
    """False: token strings were not looked up in a tokenizer."""
    items: int
    sids: int
    """Distinct SIDs."""
    shared_items: int
    """Items that share their SID with another."""
    max_items_per_sid: int
    levels: list[LevelReport]
    depths: dict[int, int]
    """Items by the length of their SID."""
    fields: tuple[str, ...]
    order: Order | None
    template: HistoryTemplate | None
    index_bytes: int

    def text(self) -> str:
        """The report for people: lines of a label and its facts, then a table of levels."""
        order = "the file's order"
        if self.order is not None:
            order = f"by {self.order.column}, {'descending' if self.order.descending else 'ascending'}"
        known = "" if self.resolved else "; not looked up in a tokenizer"
        shared = (
            f"{self.shared_items:,} share one, at most {self.max_items_per_sid:,} each" if self.shared_items else ""
        )
        lines = [
            ("catalog", f"{self.name} ({self.format}; header: {self.header or 'none'})"),
            ("sids", f"{self.sid} ({'declared' if self.sid_declared else 'detected'}){known}"),
            ("items", f"{self.items:,} under {self.sids:,} SIDs" + (f"; {shared}" if shared else "")),
            ("depth", ", ".join(f"{depth} ({items:,} items)" for depth, items in self.depths.items())),
            ("order", f"within a SID: {order}"),
            ("fields", ", ".join(self.fields) or "none"),
            ("template", repr(self.template.item) if self.template is not None else "none"),
            ("index", f"{self.index_bytes:,} bytes"),
        ]
        table = [f"{'level':>5} {'codebook':>18} {'in use':>10} {'nodes':>12} {'children: mean':>15} {'max':>8}"]
        for number, level in enumerate(self.levels):
            book = f"{level.codebook_size:,} {'declared' if level.codebook_declared else 'in use'}"
            table.append(
                f"{number:>5} {book:>18} {level.codes_in_use:>10,} {level.nodes:>12,} "
                f"{level.mean_children:>15,.1f} {level.max_children:>8,}"
            )
        return "\n".join([f"{label:<9} {fact}" for label, fact in lines] + table)


def inspect(catalog: Catalog) -> CatalogReport:
    """Measure a catalog."""
    index = catalog.index
    per_sid = index.num_terminal
    depths = {
        depth: int(per_sid[slice(*index.level_start[depth : depth + 2])].sum()) for depth in range(1, index.depth + 1)
    }
    return CatalogReport(
        name=catalog.name,
        format=catalog.format,
        header=catalog.header_place,
        sid=catalog.sid_form,
        sid_declared=catalog.header.sid is not None,
        resolved=catalog.resolved,
        items=catalog.num_items,
        sids=catalog.num_sids,
        shared_items=int(per_sid[per_sid > 1].sum()),
        max_items_per_sid=int(per_sid.max()),
        levels=[_level(catalog, level) for level in range(index.depth)],
        depths={depth: items for depth, items in depths.items() if items},
        fields=catalog.fields,
        order=catalog.header.order,
        template=catalog.template,
        index_bytes=index.nbytes,
    )


def _level(catalog: Catalog, level: int) -> LevelReport:
    index, book = catalog.index, catalog.codebooks[level]
    first, last = index.level_start[level : level + 2]
    children = np.diff(index.first_child[first : last + 1])
    codes = index.code[slice(*index.level_start[level + 1 : level + 3])]
    return LevelReport(
        codebook_size=book.token_ids.size,
        codebook_declared=book.declared,
        codes_in_use=int(np.count_nonzero(np.bincount(codes))),
        nodes=codes.size,
        mean_children=float(children[children > 0].mean()),
        max_children=index.max_fanout(level),
    )
