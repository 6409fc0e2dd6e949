"""What a filter means, said plainly: one item at a time, in Python's own comparisons."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from widebeam.constraints.filter_spec import Filters, Predicate

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, given: value in given,
    "contains": lambda value, given: given in value,
}


def holds(value: Any, op: str, given: Any) -> bool:
    """Whether a column's value, None if there is none, stands in this relation to a predicate's."""
    if op in ("!=", "not_in"):
        return not holds(value, {"!=": "==", "not_in": "in"}[op], given)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    return _COMPARE[op](value, given)


def passes(
    item_id: int | str,
    metadata: Mapping[str, Any],
    filters: Filters,
    named: Mapping[str, Sequence[Predicate]],
) -> bool:
    """Whether an item is to be returned."""
    predicates = [*(filters.where or ()), *(one for name in filters.named or () for one in named[name])]
    return (
        (filters.allow is None or str(item_id) in map(str, filters.allow))
        and str(item_id) not in map(str, filters.deny or ())
        and all(holds(metadata.get(one.column), one.op, one.value) for one in predicates)
    )


def predicate(column: str, op: str, value: Any) -> Predicate:
    """A condition, of whatever op and value."""
    return Predicate(column=column, op=op, value=value)  # type: ignore[arg-type]
