"""From sequences to ranked items. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import msgspec

from widebeam.engine.request import SearchResult, Sequence

if TYPE_CHECKING:
    from widebeam.constraints.catalog import Catalog


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


def ranked_items(catalog: Catalog, sequences: Iterable[Sequence], n: int, fields: Seq[str]) -> list[Item]:
    """The first n items under the sequences' SIDs, best first; items of one SID in the catalog's declared order."""
    items: list[Item] = []
    for sequence in sequences:
        for row in catalog.items_at(sequence.node):
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
