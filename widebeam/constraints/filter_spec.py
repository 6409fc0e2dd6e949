"""Item filters as a request writes them. Imports neither numpy nor torch: the client shares it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_FILTER_IDS = 100_000
"""Item ids in `allow`, and likewise in `deny`."""
MAX_PREDICATES = 64
"""Predicates of a request, and of a named filter; named filters of a request, and of a catalog."""
MAX_VALUES = 10_000
"""Values of one `in` or `not_in`."""

MAX_ID_LENGTH = 512
"""Characters of an item id."""

ItemId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Annotated[str, Meta(max_length=MAX_ID_LENGTH)]
FilterName = Annotated[str, Meta(min_length=1, max_length=256)]
Op = Literal["==", "!=", "<", "<=", ">", ">=", "in", "not_in", "contains"]
Scalar = bool | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | Annotated[str, Meta(max_length=4096)]


class Predicate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One condition on a metadata column: `{"column": "price", "op": "<=", "value": 20}`.

    An item without a value in the column fails it, except that `!=` and `not_in` are the exact opposites of `==` and
    `in`.
    """

    column: FilterName
    op: Op
    value: Scalar | Annotated[tuple[Scalar, ...], Meta(max_length=MAX_VALUES)]
    """A list for `in` and `not_in`, else a single value. Of the column's type; times are ISO 8601 text."""


Predicates = Annotated[tuple[Predicate, ...], Meta(max_length=MAX_PREDICATES)]


class Filters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which items a search may return: those that pass all that is given."""

    allow: Annotated[tuple[ItemId, ...], Meta(max_length=MAX_FILTER_IDS)] | None = None
    """Only these items. Those that the catalog lacks are reported, as for `deny`."""
    deny: Annotated[tuple[ItemId, ...], Meta(max_length=MAX_FILTER_IDS)] | None = None
    """None of these items."""
    where: Predicates | None = None
    """All of these conditions."""
    named: Annotated[tuple[FilterName, ...], Meta(max_length=MAX_PREDICATES)] | None = None
    """All conditions of these filters, which the catalog's header declares."""
