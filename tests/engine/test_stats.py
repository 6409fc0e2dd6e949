"""Distributions against numpy's histogram."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from widebeam.engine.stats import COUNTS, ROWS, SECONDS, TOKENS, Distribution, Distributions


@given(st.sampled_from([COUNTS, ROWS, SECONDS, TOKENS]), st.lists(st.floats(0, 1e6) | st.sampled_from(TOKENS)))
def test_numbers_are_counted_up_to_the_bound_that_they_reach(bounds: tuple[float, ...], numbers: list[float]) -> None:
    seen = Distribution(bounds)
    for number in numbers:
        seen.add(number)
    # numpy's bins take their lower edge in, ours the upper one: count what is mirrored
    edges = [-math.inf, *(-bound for bound in reversed(bounds)), math.inf]
    expected, _ = np.histogram([-number for number in numbers], edges)
    assert seen.counts == expected[::-1].tolist()
    assert math.isclose(seen.sum, math.fsum(numbers))


def test_a_copy_stays_as_it_was() -> None:
    seen = Distributions()
    seen.beam_width.add(5)
    copy = seen.copy()
    seen.beam_width.add(7)
    assert (sum(copy.beam_width.counts), copy.beam_width.sum) == (1, 5)
    assert sum(Distributions().beam_width.counts) == 0
