"""Predicates over Arrow columns of every type against Python's own comparisons; and what is refused."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.constraints.filter_oracle import holds
from widebeam.constraints.filter_spec import Predicate
from widebeam.constraints.predicates import bind, matches
from widebeam.errors import InvalidRequest

ORDERED = ["==", "!=", "<", "<=", ">", ">=", "in", "not_in"]
EQUALITY = ["==", "!=", "in", "not_in"]


@dataclass
class Case:
    """One column type: what it holds, what it is compared with, and both as the oracle compares them."""

    kind: pa.DataType
    values: st.SearchStrategy[Any]
    given: st.SearchStrategy[Any]
    ops: list[str]
    plain: Callable[[Any], Any] = lambda value: value
    plain_given: Callable[[Any], Any] = lambda value: value


def whole(kind: pa.DataType, low: int, high: int) -> Case:
    values = st.integers(low, high) | st.integers(max(low, -3), 3) | st.sampled_from([low, high])
    near = st.sampled_from([low, low - 1, high, high + 1]).filter(lambda n: -(2**63) <= n < 2**63)
    floats = st.sampled_from([-0.5, 0.5, 1.0, 2.5, -2.5, 1e300, -1e300, float(high)])
    return Case(kind, values, st.integers(-3, 3) | near | floats, ORDERED)


def real(kind: pa.DataType, round_to: Callable[[Any], Any]) -> Case:
    some = [0.0, -0.0, 0.1, -0.1, 1.0, 2.5, float("inf"), float("-inf"), float("nan"), float(2**60)]
    given = st.sampled_from([0, 1, 0.0, -0.0, 0.1, -0.1, 2.5, 2**60, 2**60 + 1, -7])
    return Case(kind, st.sampled_from([round_to(value) for value in some]), given, ORDERED, float, round_to)


def text(kind: pa.DataType) -> Case:
    some = st.sampled_from(["", "a", "ab", "b", "ba", "é", "\U0001f600", "\uffff", "z"]) | st.text(max_size=3)
    some = some.filter(lambda value: all(not "\ud800" <= char <= "\udfff" for char in value))
    return Case(kind, some, some, [*ORDERED, "contains"])


def decimal(kind: pa.DataType) -> Case:
    values = st.integers(-999, 999).map(lambda units: Decimal(units).scaleb(-kind.scale))
    given = st.sampled_from([0, 1, -3, 0.5, 0.25, 0.1, 0.105, 2.5, 1e30, -1e30, 2**62, 9.99]) | st.integers(-9, 9)
    return Case(kind, values, given, ORDERED, Fraction, lambda value: Fraction(str(value)))


EPOCH = datetime.datetime(1970, 1, 1)


def seconds(text: str) -> Fraction:
    """Since 1970, of an ISO 8601 time in UTC."""
    time = datetime.datetime.fromisoformat(text)
    since = (time - time.utcoffset() if time.utcoffset() else time).replace(tzinfo=None) - EPOCH
    return since.days * 86_400 + since.seconds + Fraction(since.microseconds, 10**6)


def moment(unit: str, zone: str | None) -> Case:
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    values = st.integers(-2 * per_second, 2 * per_second) | st.sampled_from([-(2**63) + 1, 2**63 - 1])
    given = ["1970-01-01", "1970-01-01T00:00:01", "1970-01-01 00:00:00.5", "1969-12-31T23:59:59.999999"]
    given += ["0001-01-01", "9999-12-31T23:59:59"]
    given += ["1970-01-01T00:00:01Z", "1970-01-01T01:00:00.000001+01:00"] if zone else []
    return Case(
        pa.timestamp(unit, zone), values, st.sampled_from(given), ORDERED, lambda n: Fraction(n, per_second), seconds
    )


def day(kind: pa.DataType) -> Case:
    values = st.dates() | st.dates(datetime.date(1969, 12, 30), datetime.date(1970, 1, 3))
    given = st.sampled_from(["1970-01-01", "1969-12-31", "0001-01-01", "9999-12-31", "1970-01-02"])
    return Case(kind, values, given, ORDERED, plain_given=datetime.date.fromisoformat)


CASES = [
    whole(pa.int8(), -128, 127),
    whole(pa.uint16(), 0, 2**16 - 1),
    whole(pa.int64(), -(2**63), 2**63 - 1),
    whole(pa.uint64(), 0, 2**64 - 1),
    real(pa.float64(), float),
    real(pa.float32(), lambda value: float(np.float32(value))),
    Case(pa.bool_(), st.booleans(), st.booleans(), EQUALITY),
    text(pa.string()),
    text(pa.large_string()),
    text(pa.string_view()),
    decimal(pa.decimal128(5, 2)),
    decimal(pa.decimal256(60, 3)),
    day(pa.date32()),
    day(pa.date64()),
    *(moment(unit, zone) for unit, zone in [("s", None), ("ms", "UTC"), ("us", None), ("ns", "Europe/Paris")]),
]


def column(data: st.DataObject, values: list[Any], kind: pa.DataType) -> pa.ChunkedArray:
    """In chunks, with a beginning that is cut off, and sometimes as dictionaries that differ by chunk."""
    cut = data.draw(st.integers(0, len(values)))
    chunks = [pa.array([*values[:1], *part], kind).slice(1) for part in (values[:cut], values[cut:])]
    encodable = not pa.types.is_string_view(kind) and not pa.types.is_nested(kind)
    if encodable and data.draw(st.booleans()):
        chunks = [chunk.dictionary_encode() for chunk in chunks]
    return pa.chunked_array(chunks)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.kind))
@settings(max_examples=60)
@given(data=st.data())
def test_operators_mean_what_python_means(case: Case, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | case.values, min_size=1, max_size=12))
    op = data.draw(st.sampled_from(case.ops))
    asked = data.draw(st.lists(case.given, max_size=4).map(tuple) if op in ("in", "not_in") else case.given)
    plain = tuple(map(case.plain_given, asked)) if isinstance(asked, tuple) else case.plain_given(asked)
    expected = [holds(None if value is None else case.plain(value), op, plain) for value in values]
    found = matches(Predicate(column="x", op=op, value=asked), column(data, values, case.kind), "where")
    assert found.tolist() == expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.kind))
@settings(max_examples=25)
@given(data=st.data(), outer=st.sampled_from([pa.list_, pa.large_list, lambda kind: pa.list_(kind, 2)]))
def test_lists_contain_what_equals_an_element(
    case: Case, data: st.DataObject, outer: Callable[[pa.DataType], pa.DataType]
) -> None:
    kind = outer(case.kind)
    size = {"min_size": 2, "max_size": 2} if pa.types.is_fixed_size_list(kind) else {"max_size": 3}
    values = data.draw(st.lists(st.none() | st.lists(st.none() | case.values, **size), min_size=1, max_size=8))
    asked = data.draw(case.given)
    expected = [
        any(
            element is not None and holds(case.plain(element), "==", case.plain_given(asked)) for element in value or ()
        )
        for value in values
    ]
    found = matches(Predicate(column="x", op="contains", value=asked), column(data, values, kind), "where")
    assert found.tolist() == expected


@pytest.mark.parametrize("op", [*ORDERED, "contains"])
def test_a_column_without_values_takes_any_predicate(op: Any) -> None:
    empty = pa.chunked_array([pa.nulls(3), pa.nulls(1)])
    for value in (1, "a", True, 0.5):
        asked = Predicate(column="x", op=op, value=(value,) if "in" in op.split("_") else value)
        assert matches(asked, empty, "where").tolist() == [holds(None, op, asked.value)] * 4
    assert bind(Predicate(column="x", op="contains", value=1), pa.list_(pa.null()), "where") is not None


NUMBER, TEXT = "the value must be a number", "the value must be text"
NOT_COMPARED = "which filters cannot compare"


@pytest.mark.parametrize(
    ("kind", "op", "value", "code", "param", "message"),
    [
        (pa.int32(), "==", "7", "type_mismatch", "w.value", f"column 'x' holds int32: {NUMBER}"),
        (pa.int32(), "<", True, "type_mismatch", "w.value", NUMBER),
        (pa.int32(), "in", (1, 2, "3"), "type_mismatch", "w.value[2]", NUMBER),
        (pa.int32(), "==", (1,), "type_mismatch", "w.value", "op '==' takes a single value"),
        (pa.int32(), "not_in", 1, "type_mismatch", "w.value", "op 'not_in' takes a list of values"),
        (pa.int32(), "contains", 1, "type_mismatch", "w.op", "to which op 'contains' does not apply"),
        (pa.float32(), ">", "1.5", "type_mismatch", "w.value", NUMBER),
        (pa.decimal128(5, 2), ">", "1.5", "type_mismatch", "w.value", NUMBER),
        (pa.bool_(), "==", 1, "type_mismatch", "w.value", "the value must be true or false"),
        (pa.bool_(), "<=", True, "type_mismatch", "w.op", "holds bool, to which op '<=' does not apply"),
        (pa.string(), "==", 7, "type_mismatch", "w.value", TEXT),
        (pa.string(), "contains", 7, "type_mismatch", "w.value", TEXT),
        (pa.string(), "contains", ("a",), "type_mismatch", "w.value", "op 'contains' takes a single value"),
        (pa.dictionary(pa.int8(), pa.string()), "!=", 7, "type_mismatch", "w.value", TEXT),
        (pa.date32(), "<", "2030-02-30", "type_mismatch", "w.value", "a date such as 2030-01-31"),
        (pa.date32(), "<", "2030-01-31T00:00:00", "type_mismatch", "w.value", "a date such as 2030-01-31"),
        (pa.date64(), "<", 20300131, "type_mismatch", "w.value", "a date such as 2030-01-31"),
        (pa.timestamp("us"), "<", "soon", "type_mismatch", "w.value", "2030-01-31T12:00:00, without an offset"),
        (pa.timestamp("us"), "<", "2030-01-31T12:00:00Z", "type_mismatch", "w.value", "without an offset"),
        (pa.timestamp("ns", "UTC"), "<", 5, "type_mismatch", "w.value", "2030-01-31T12:00:00Z"),
        (pa.timestamp("ns", "UTC"), "<", "2030-01-31T12:00:00.1234567Z", "type_mismatch", "w.value", "6 decimals"),
        (pa.list_(pa.string()), "==", "a", "type_mismatch", "w.op", "to which op '==' does not apply"),
        (pa.list_(pa.string()), "in", ("a",), "type_mismatch", "w.op", "to which op 'in' does not apply"),
        (pa.list_(pa.string()), "contains", 7, "type_mismatch", "w.value", TEXT),
        (pa.list_(pa.list_(pa.string())), "contains", "a", "type_mismatch", "w.op", "does not apply"),
        (pa.struct([("a", pa.int32())]), "==", 1, "unsupported_column", "w.column", NOT_COMPARED),
        (pa.list_(pa.struct([("a", pa.int32())])), "contains", 1, "type_mismatch", "w.op", "does not apply"),
        (pa.map_(pa.string(), pa.int32()), "contains", "a", "unsupported_column", "w.column", NOT_COMPARED),
        (pa.float16(), "==", 1, "unsupported_column", "w.column", NOT_COMPARED),
        (pa.binary(), "==", "a", "unsupported_column", "w.column", NOT_COMPARED),
        (pa.time64("us"), "<", "12:00", "unsupported_column", "w.column", f"holds time64[us], {NOT_COMPARED}"),
        (pa.duration("s"), "<", 5, "unsupported_column", "w.column", NOT_COMPARED),
    ],
)
def test_what_does_not_suit_a_column_is_refused(
    kind: pa.DataType, op: Any, value: Any, code: str, param: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        matches(Predicate(column="x", op=op, value=value), pa.chunked_array([pa.nulls(2, kind)]), "w")
    assert (caught.value.code, caught.value.param) == (code, param)
    assert message in caught.value.message
