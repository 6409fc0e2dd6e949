"""What runs before the first request, so that nothing is compiled or captured while users wait.

The ladder has few dimensions (see shapes.py): rows, prompt tokens of short waves, whether contexts are cut, whether
stop tokens count. Waves of made-up prompts walk through all of them; each runs twice, since a graph is captured the
second time. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from widebeam.constraints.catalog import Catalog
from widebeam.engine.request import Normalizer
from widebeam.engine.scheduler import WaveLimits
from widebeam.engine.shapes import LEAST_ROWS, context_splits, rung, token_rung
from widebeam.engine.wave import Search, bound_widths, join_factor

TIMES = 2
LEVELS = 3
"""A first level, one between and a last one."""
LONG = 2048
"""A context that is cut in parts."""


def row_rungs(limit: int) -> list[int]:
    """All rungs of rows up to the limit."""
    rungs = [rung(LEAST_ROWS)]
    while rungs[-1] < limit:
        rungs.append(rung(rungs[-1] + 1, limit))
    return rungs


def token_rungs(limit: int) -> list[int]:
    """All rungs of prompt tokens up to the limit."""
    rungs = [token_rung(1)]
    while (following := token_rung(rungs[-1] + 1)) <= limit:
        rungs.append(following)
    return [min(rungs[0], limit), *rungs[1:]]


def waves(limits: WaveLimits, widest: int, vocab_size: int, longest: int, padded_tokens: int) -> Iterator[list[Search]]:
    """Waves over any token, which meet every rung of rows with and without stop tokens, and where some searches end
    before others; between them every rung of tokens; contexts that are cut; and greedy text."""
    rows = row_rungs(min(limits.rows, limits.beam_slots // (LEVELS - 1)))
    room = min(longest - LEVELS, limits.tokens, (limits.context_pages - limits.requests) * limits.page_size)
    tokens = token_rungs(min(padded_tokens, room))
    for place in range(max(len(rows), len(tokens))):
        yield wave(rows[min(place, len(rows) - 1)], widest, tokens[min(place, len(tokens) - 1)], vocab_size)
    for size in rows:
        if room >= LONG and context_splits(size, LONG) > 1:
            yield wave(size, widest, LONG, vocab_size)
        yield wave(size, widest, LEAST_ROWS, vocab_size, stops=True)
        yield wave(size, min(widest, size // 2), LEAST_ROWS, vocab_size, levels=(LEVELS, LEVELS - 1))
    yield wave(min(limits.requests, LEAST_ROWS), 1, LEAST_ROWS, vocab_size, stops=True)


def catalog_waves(
    limits: WaveLimits, widest: int, vocab_size: int, catalog: Catalog, normalizers: tuple[Normalizer, ...]
) -> Iterator[list[Search]]:
    """Waves over a catalog, which meet every rung of rows that it can fill, for each of the normalisers."""
    levels, reached = (catalog.depth,), 0
    for size in row_rungs(min(limits.rows, limits.beam_slots // max(1, catalog.depth - 1))):
        searches = wave(size, widest, LEAST_ROWS, vocab_size, levels=levels, catalog=catalog)
        rows = sum(search.rows for search in searches)
        if rows > reached:
            yield from ([replace(search, normalizer=name) for search in searches] for name in normalizers)
        reached = max(reached, rows)


def wave(
    rows: int,
    widest: int,
    tokens: int,
    vocab_size: int,
    *,
    levels: tuple[int, ...] = (LEVELS,),
    stops: bool = False,
    catalog: Catalog | None = None,
) -> list[Search]:
    """Searches that have so many rows and prompt tokens together, and by turns so many levels."""
    count = -(-rows // min(widest, vocab_size))
    searches = []
    for b in range(count):
        widths = bound_widths((rows // count,) * levels[b % len(levels)], catalog, vocab_size)
        searches.append(
            Search(
                request_id="warm-up",
                token_ids=np.arange(b, tokens, count, dtype=np.int32) % vocab_size,
                widths=widths,
                num_returned=widths[-1],
                catalog=catalog,
                normalizer="vocab",
                join=join_factor(catalog, greedy=widest == 1, has_stops=stops),
                stop_token_ids=(0,) if stops else (),
                length_penalty=1.0,
            )
        )
    return searches
