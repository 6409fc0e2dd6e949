"""From values of JSON to cells of a metadata column, for items that change."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from widebeam.constraints.column_types import column_type
from widebeam.constraints.predicates import is_list
from widebeam.errors import InvalidRequest

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_REFUSALS = (pa.ArrowException, OverflowError, ValueError)
"""What Arrow raises for a value that a type cannot hold."""


def cells(kind: pa.DataType, values: Sequence[Any], field: str) -> pa.Array:
    """Values as cells of a column of that type, exactly (floating point apart); times are text, as in filters.

    Raises InvalidRequest (`type_mismatch`, `unsupported_column`), for which values[i] is `upsert[i].field`.
    """
    stored = [_stored(kind, value, field, place) for place, value in enumerate(values)]
    try:
        return pa.array(stored, kind)
    except _REFUSALS as error:
        for place, value in enumerate(stored):
            try:
                pa.array([value], kind)
            except _REFUSALS as reason:
                raise _mismatch(kind, field, place, f"cannot hold it: {reason}") from None
        raise _mismatch(kind, field, 0, f"cannot hold one of the values: {error}") from None


def fitted(column: pa.ChunkedArray, values: Sequence[Any], field: str) -> tuple[pa.ChunkedArray, pa.Array] | None:
    """A column that was made of JSON and cells for more values, both of the one type that suits all; None for objects,
    which may differ.

    Null suits every type, and whole numbers suit others. Raises InvalidRequest (`type_mismatch`) as `cells` does.
    """
    kind = column.type
    for place, value in enumerate(values):
        if value is not None:
            try:
                kind = _common(kind, pa.array([value]).type)
            except _REFUSALS as error:
                raise _mismatch(column.type, field, place, f"does not suit: {error}") from None
    if _has_objects(kind):
        return None
    try:
        return column.cast(kind), pa.array(values, kind)
    except _REFUSALS as error:  # whole numbers that no floating-point number is equal to
        raise _mismatch(column.type, field, 0, f"cannot be {kind}: {error}") from None


def _stored(kind: pa.DataType, value: Any, field: str, place: int) -> Any:
    """A value as Arrow's conversion takes it, which would cut some and accept other types."""
    if value is None:
        return None
    if pa.types.is_dictionary(kind):
        return _stored(kind.value_type, value, field, place)
    if is_list(kind):
        if not isinstance(value, list):
            raise _mismatch(kind, field, place, "the value must be a list")
        return [_stored(kind.value_type, one, field, place) for one in value]
    known = column_type(kind)
    if known is None:
        raise InvalidRequest(
            f"upsert[{place}]: column {field!r} holds {kind}, which cannot be given as JSON",
            code="unsupported_column",
            param=f"upsert[{place}].{field}",
        )
    read = known.read(value)
    if read is None:
        raise _mismatch(kind, field, place, f"the value must be {known.wants}")
    if pa.types.is_decimal(kind):
        return Decimal(str(read))
    if pa.types.is_integer(kind) or isinstance(read, Fraction):
        if Fraction(read).denominator != 1:
            raise _mismatch(kind, field, place, f"{value!r} is between two of its values")
        return int(read)
    if pa.types.is_float32(kind) and abs(read) > _FLOAT32_MAX:
        raise _mismatch(kind, field, place, "the number is too large")
    return read


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type that Arrow finds for values of both. Raises ValueError."""
    types = pa.types
    if one.equals(other) or types.is_null(other):
        return one
    if types.is_null(one) or (types.is_int64(one) and types.is_float64(other)):
        return other
    if (types.is_float64(one) and types.is_int64(other)) or (types.is_struct(one) and types.is_struct(other)):
        return one
    if types.is_list(one) and types.is_list(other):
        return pa.list_(_common(one.value_type, other.value_type))
    raise ValueError(f"the value is {other}")


def _has_objects(kind: pa.DataType) -> bool:
    return _has_objects(kind.value_type) if is_list(kind) else pa.types.is_struct(kind)


def _mismatch(kind: pa.DataType, field: str, place: int, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"upsert[{place}]: column {field!r} holds {kind}: {reason}",
        code="type_mismatch",
        param=f"upsert[{place}].{field}",
    )
