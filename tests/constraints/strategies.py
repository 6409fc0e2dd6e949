"""What Hypothesis draws for the catalog tests."""

from __future__ import annotations

from hypothesis import strategies as st

SIDS = st.integers(1, 5).flatmap(
    lambda depth: st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=depth).map(tuple),
        min_size=1,
        max_size=40,
    )
)
"""Few codes and mixed depths: crossing prefixes, items that share a SID, SIDs that extend another."""

WIDE_SIDS = st.lists(
    st.lists(st.sampled_from([0, 1, 255, 8191, 2**20, 2**31 - 2]), min_size=1, max_size=32).map(tuple),
    min_size=1,
    max_size=12,
)
"""Large codes and many levels: more than one 64-bit sort key."""

ITEM_IDS = st.one_of(
    st.integers(-(2**65), 2**65),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 50),
    st.integers(0, 50).map(str),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=6),
)


@st.composite
def items(draw: st.DrawFn, depth: int | None = None, ids: st.SearchStrategy[int | str] = ITEM_IDS) -> list[tuple]:
    """(item id, SID as codes 0..3) of up to 30 items; ids differ as text. `depth`: the length of every SID."""
    keys = draw(st.lists(ids, min_size=1, max_size=30, unique_by=str))
    low, high = (1, 4) if depth is None else (depth, depth)
    sid = st.lists(st.integers(0, 3), min_size=low, max_size=high)
    return [(key, draw(sid)) for key in keys]
