"""From sequences to ranked items. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import msgspec

from widebeam.engine.request import LevelBeams, SearchResult, Sequence, Timing

if TYPE_CHECKING:
    from widebeam.constraints.catalog import Catalog
    from widebeam.constraints.filters import ItemMask
    from widebeam.engine.wave import Search


class Item(msgspec.Struct, kw_only=True):
    """One recommended item."""

    id: int | str
    sid: list[int | str]
    """The item's semantic ID in the form that the catalog declares it."""
    token_ids: list[int]
    score: float
    """Score of the sequence that spells the SID."""
    cum_logprob: float
    metadata: dict[str, Any]


class Recommendation(msgspec.Struct, kw_only=True):
    """Ranked items and the search behind them."""

    items: list[Item]
    result: SearchResult
    unknown_items: list[int | str]
    """History items that the catalog does not have."""
    num_history: int
    """History items that reached the prompt."""


class Prefilled(msgspec.Struct, kw_only=True):
    """A prompt that was computed ahead of its search."""

    result: SearchResult
    """Without sequences."""
    cacheable_tokens: int
    """Its first tokens that a search for it need not compute, as long as they are not evicted."""


def rows_of(catalog: Catalog, sequence: Sequence, mask: ItemMask | None) -> Iterable[int]:
    """Rows of the items that a sequence spells and the mask allows, in the catalog's order and up to its limit."""
    rows = catalog.items_at(sequence.node)
    allowed = rows if mask is None else (row for row in rows if mask.allows(row))
    return itertools.islice(allowed, catalog.header.max_items_per_sid)


def no_result(search: Search, warnings: list[str], waited_ms: float) -> SearchResult:
    """What is found where nothing may be."""
    catalog, details = search.catalog, search.return_beam_details
    return SearchResult(
        request_id=search.request_id,
        sequences=[],
        prompt_tokens=search.num_tokens,
        normalizer=search.normalizer,
        catalog=None if catalog is None else catalog.name,
        catalog_version=None if catalog is None else catalog.version,
        timing_ms=Timing(queue=waited_ms, prefill=0.0, decode=0.0, total=waited_ms),
        warnings=warnings,
        widths=search.widths,
        levels=[LevelBeams(parents=[], token_ids=[], scores=[]) for _ in search.widths] if details else None,
    )


def ranked_items(
    catalog: Catalog, sequences: Iterable[Sequence], n: int, fields: Seq[str], mask: ItemMask | None = None
) -> list[Item]:
    """The first n items under the sequences' SIDs, best first; items of one SID in the catalog's declared order."""
    items: list[Item] = []
    for sequence in sequences:
        for row in rows_of(catalog, sequence, mask):
            if len(items) == n:
                return items
            items.append(
                Item(
                    id=catalog.item_id(row),
                    sid=catalog.sid(row),
                    token_ids=sequence.token_ids,
                    score=sequence.score,
                    cum_logprob=sequence.cum_logprob,
                    metadata=catalog.metadata(row, fields) if fields else {},
                )
            )
    return items
