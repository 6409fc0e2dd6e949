"""anchored_history: which events are kept, and that a history continues the one before until its start moves."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widebeam import anchored_history

windows = st.integers(1, 60).flatmap(lambda limit: st.tuples(st.just(limit), st.integers(1, limit)))
"""(limit, block)"""
events = st.lists(st.integers(0, 3), max_size=200)
"""Few different ones, so that what is right by chance shows as little as in real histories."""


@given(events, windows)
def test_the_newest_from_the_first_multiple_that_fits(events: list[int], window: tuple[int, int]) -> None:
    limit, block = window
    kept = anchored_history(events, limit, block)
    start = next(start for start in range(0, len(events) + 1, block) if len(events) - start <= limit)
    assert kept == events[start:]
    assert len(kept) == len(events) if len(events) <= limit else limit - block + 1 <= len(kept) <= limit


@given(windows, st.integers(1, 300))
def test_a_history_continues_the_one_before_for_block_events(window: tuple[int, int], total: int) -> None:
    limit, block = window
    histories = [anchored_history(range(count), limit, block) for count in range(1, total + 1)]
    moves = []
    for count, (before, after) in enumerate(itertools.pairwise(histories), start=2):
        if after[:-1] != before:
            moves.append(count)
            assert after[0] == before[0] + block
    assert moves == list(range(limit + 1, total + 1, block))


@given(events, windows, st.data())
def test_a_tail_with_its_offset_gives_the_same(events: list[int], window: tuple[int, int], data: st.DataObject) -> None:
    limit, block = window
    whole = anchored_history(events, limit, block)
    offset = data.draw(st.integers(0, len(events)))
    if offset <= len(events) - len(whole):  # true of every tail of at least `limit` events
        assert anchored_history(events[offset:], limit, block, offset=offset) == whole
    else:
        assert len(events) - offset < limit
        with pytest.raises(ValueError, match=f"begin at offset {offset}: give the {limit} newest"):
            anchored_history(events[offset:], limit, block, offset=offset)


@given(events, st.integers(1, 60))
def test_a_block_of_one_is_the_plain_window(events: list[int], limit: int) -> None:
    assert anchored_history(events, limit, 1) == events[-limit:]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"limit": 0}, "limit must be at least 1, not 0"),
        ({"block": 0}, "block must be at least 1, not 0"),
        ({"block": 9}, "block must be at most limit (8), not 9"),
        ({"offset": -1}, "offset must be at least 0, not -1"),
    ],
)
def test_what_makes_no_sense_is_refused(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        anchored_history(["a", "b"], **{"limit": 8, "block": 4, **given_})


def test_events_are_left_alone() -> None:
    mine = ["a", "b", "c"]
    anchored_history(mine, 8, 4).append("d")
    assert mine == ["a", "b", "c"]
