"""The types of catalog columns: what a predicate may compare each with, and how.

Integers, decimals and times are whole numbers of some unit, so they are compared exactly: a value between two of them
moves to its neighbour (`x < 2.5` is `x <= 2`), one outside the type's range is above or below all. Floating-point
columns compare with the value rounded to their type.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from widebeam.constraints.filter_spec import Scalar

Test = Callable[[pa.Array], pa.Array]
"""Values -> booleans; false or null where there is no value."""
MakeTest = Callable[[str, list[Any]], Test]
"""(op, values) -> test; a single value but for `in`."""

_COMPARE = {"==": pc.equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_ORDERED = (*_COMPARE, "in")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_UNITS = {"s": Fraction(1, 10**6), "ms": Fraction(1, 10**3), "us": Fraction(1), "ns": Fraction(10**3)}
"""Of a timestamp column, in one microsecond."""
_SEVEN_DECIMALS = re.compile(r"[.,]\d{7}")


@dataclass(frozen=True)
class ColumnType:
    """How single values of one Arrow type are compared."""

    wants: str
    """What a predicate's value must be, in words."""
    ops: Sequence[str]
    """Of `==`, `<`, `<=`, `>`, `>=`, `in`, `contains`."""
    read: Callable[[Any], Any]
    """A predicate's value as `test` takes it; None if it does not suit."""
    test: MakeTest


def column_type(kind: pa.DataType) -> ColumnType | None:
    """None: values of this type cannot be compared."""
    types = pa.types
    if types.is_boolean(kind):
        return ColumnType("true or false", ("==", "in"), _boolean, _comparison(kind))
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        stored = pa.large_string() if types.is_string_view(kind) else kind
        return ColumnType("text", (*_ORDERED, "contains"), _text, _comparison(stored))
    if types.is_float32(kind) or types.is_float64(kind):
        return ColumnType("a number", _ORDERED, _number, _floating(kind))
    if types.is_integer(kind):
        low = -(2 ** (kind.bit_width - 1)) if types.is_signed_integer(kind) else 0
        return ColumnType("a number", _ORDERED, _number, _whole(kind, low, low + 2**kind.bit_width - 1))
    if types.is_decimal(kind):
        return ColumnType("a number", _ORDERED, _number, _decimal(kind))
    if types.is_date(kind):
        stored, per_day = (pa.int32(), 1) if types.is_date32(kind) else (pa.int64(), 86_400_000)
        return ColumnType("a date such as 2030-01-31", _ORDERED, lambda value: _date(value, per_day), _whole(stored))
    if types.is_timestamp(kind):
        unit, zoned = _UNITS[kind.unit], kind.tz is not None
        example = "2030-01-31T12:00:00Z" if zoned else "2030-01-31T12:00:00, without an offset"
        wants = f"a time of at most 6 decimals such as {example}"
        return ColumnType(wants, _ORDERED, lambda value: _time(value, unit, zoned), _whole(pa.int64()))
    if types.is_null(kind):
        return ColumnType("", (*_ORDERED, "contains"), lambda value: value, lambda op, values: _nowhere)
    return None


# The values of predicates


def _boolean(value: Scalar) -> bool | None:
    return value if isinstance(value, bool) else None


def _number(value: Scalar) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: Scalar) -> str | None:
    return value if isinstance(value, str) else None


def _date(value: Scalar, per_day: int) -> int | None:
    """In units since 1970."""
    try:
        day = datetime.date.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return None if day is None else (day - _EPOCH.date()).days * per_day


def _time(value: Scalar, unit: Fraction, zoned: bool) -> Fraction | None:
    """In units since 1970. Without an offset it is UTC."""
    if not isinstance(value, str) or _SEVEN_DECIMALS.search(value):
        return None
    try:
        time = datetime.datetime.fromisoformat(value)
    except ValueError:
        return None
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    elif not zoned:
        return None
    return (time - _EPOCH) // datetime.timedelta(microseconds=1) * unit


# The tests of arrays


def _comparison(stored: pa.DataType) -> MakeTest:
    """Tests of arrays cast to `stored`, the type that the values have."""

    def test(op: str, values: list[Any]) -> Test:
        if op == "in":
            value_set = pa.array(values, stored)
            return lambda array: pc.is_in(array.cast(stored), value_set=value_set)
        if op == "contains":
            return lambda array: pc.match_substring(array.cast(stored), values[0])
        compare, scalar = _COMPARE[op], pa.scalar(values[0], stored)
        return lambda array: compare(array.cast(stored), scalar)

    return test


def _floating(kind: pa.DataType) -> MakeTest:
    compare = _comparison(kind)

    def test(op: str, values: list[Any]) -> Test:
        zeros = [0.0, -0.0] if op == "in" and 0 in values else []  # `==` holds between the two, `in` tells them apart
        return compare(op, [float(value) for value in values] + zeros)

    return test


def _decimal(kind: pa.DataType) -> MakeTest:
    """Decimals are whole numbers of the column's last digit. A value is what it says in decimal: 0.1 is a tenth."""
    stored = kind if kind.bit_width > 64 else pa.decimal128(kind.precision, kind.scale)  # smaller ones have no `in`
    most = 10**kind.precision - 1
    whole = _whole(stored, -most, most, lambda units: Decimal(f"{units}E{-kind.scale}"))
    return lambda op, values: whole(op, [Fraction(str(value)) * Fraction(10) ** kind.scale for value in values])


def _whole(
    stored: pa.DataType, low: int = -(2**63), high: int = 2**63 - 1, of_units: Callable[[int], Any] = int
) -> MakeTest:
    """Tests of a type that holds low .. high units; `of_units` gives so many units as Arrow takes them."""
    compare = _comparison(stored)

    def test(op: str, values: list[Any]) -> Test:
        if op == "in":
            exact = map(Fraction, values)
            return compare("in", [of_units(int(v)) for v in exact if v.denominator == 1 and low <= v <= high])
        (value,) = values
        units = math.floor(value)
        if units != value:
            if op == "==":
                return _nowhere
            op, units = ("<=", units) if op in ("<", "<=") else (">=", units + 1)
        if low <= units <= high:
            return compare(op, [of_units(units)])
        everywhere = op != "==" and (op in ("<", "<=")) == (units > high)
        return pc.is_valid if everywhere else _nowhere

    return test


def _nowhere(array: pa.Array) -> pa.Array:
    return pa.nulls(len(array), pa.bool_())
