"""The order of items that share one SID, as a header declares it, and where each file row comes in the order of all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from widebeam.constraints.header import Header, HeaderMismatch


def declared_order(header: Header, column: Callable[[str], pa.ChunkedArray]) -> np.ndarray | None:
    """int64 [rows]; the rows of a column sorted as the header declares it, or None for the order that they have.

    Raises HeaderMismatch.
    """
    if header.order is None:
        return None
    direction = "descending" if header.order.descending else "ascending"
    try:
        values = column(header.order.column)
        order = pc.array_sort_indices(values, order=direction, null_placement="at_end")
    except pa.ArrowException as error:
        raise HeaderMismatch(f"order.column: cannot sort by {header.order.column!r}: {error}") from None
    return order.to_numpy().astype(np.int64)


def rank_of(order: np.ndarray, file_rows: int) -> np.ndarray:
    """int32 [file rows]; the place of each in `order`, -1 for those that are not there."""
    rank = np.full(file_rows, -1, np.int32)
    rank[order] = np.arange(order.size, dtype=np.int32)
    return rank
