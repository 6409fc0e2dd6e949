"""How many beams can be live at each level, and from how many candidates they are taken. Imports no torch."""

from __future__ import annotations

from widebeam.constraints.catalog import Catalog

ALL_CANDIDATES = 1 << 32
"""A join factor that no candidate list reaches."""


def bound_widths(
    widths: tuple[int, ...], catalog: Catalog | None, vocab_size: int, cap: int | None = None
) -> tuple[int, ...]:
    """Rows that can be live after each level: never more than asked for, than SID prefixes exist, than parents have
    children, than `cap` behind each first token. Rows beyond that are dead for certain and would only cost time."""
    bounded: list[int] = []
    previous = 1
    first_tokens = vocab_size if catalog is None else catalog.index.nodes_at(1)
    for level, width in enumerate(widths):
        if cap is not None:
            width = min(width, cap * first_tokens)
        if catalog is None:
            previous = min(width, previous * vocab_size)
        else:
            index = catalog.index
            previous = min(width, index.nodes_at(level + 1), previous * index.max_fanout(level))
        bounded.append(previous)
    return tuple(bounded)


def join_factor(catalog: Catalog | None, *, greedy: bool, has_stops: bool) -> int:
    """How many candidates a step considers per unit of width.

    `width` of them are all that can survive. Where a SID can be the prefix of another, items may end among them, so
    every legal child is considered. Stop tokens may end some as well: beams look at twice as many (as merged SGLang),
    while greedy text looks at the best alone, since a stop ends it.
    """
    if catalog is not None:
        return ALL_CANDIDATES if catalog.index.mixed_depth else 1
    return 2 if has_stops and not greedy else 1
