"""What runs before the first request, so that nothing is compiled or captured while users wait.

The ladder has few dimensions (see shapes.py): rows, prompt tokens of short waves, whether contexts are cut, whether
stop tokens count. Waves of made-up prompts walk through all of them. Every one of them is a wave that the scheduler may
form. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filters import ItemMask
from widebeam.engine.request import Normalizer
from widebeam.engine.scheduler import Load, WaveLimits
from widebeam.engine.shapes import (
    COMMON_TOKENS,
    GROUP_TOKENS,
    LARGE_STEP,
    LEAST_ROWS,
    SPLIT_CONTEXT,
    Size,
    context_splits,
    request_rung,
    rung,
    token_rung,
    token_rungs,
)
from widebeam.engine.wave import Search, Wave, narrowed
from widebeam.engine.widths import bound_widths, join_factor
from widebeam.kv.prefix import Prefix, prefix_keys
from widebeam.policies import LevelPlan

LEVELS = 3
"""A first level, one between and a last one."""
SALT = b"warm-up"
PLANS = (LevelPlan((), margin=8.0), LevelPlan((), cap=1), LevelPlan((), noise=True, seed=0))
"""One for each form of a level's step that policies ask for."""


def row_rungs(limit: int) -> list[int]:
    """All rungs of rows up to the limit."""
    rungs = [rung(LEAST_ROWS, limit)]
    while rungs[-1] < limit:
        rungs.append(rung(rungs[-1] + 1, limit))
    return rungs


def row_sizes(limits: WaveLimits, widest: int, levels: int) -> list[int]:
    """The least number of rows that meets each rung, of those that searches of so many levels can reach."""
    rungs = [size for size in row_rungs(limits.rows) if size * (levels - 1) <= limits.beam_slots]
    least = [1, *(size + 1 for size in rungs)][: len(rungs)]
    return [size for size in least if size <= limits.requests * widest]


def waves(
    limits: WaveLimits, widest: int, vocab_size: int, longest: int, policies: bool = False
) -> Iterator[list[Search]]:
    """Waves over any token, which meet every rung of rows with and without stop tokens, and where some searches end
    before others; between them every rung of prompt tokens up to COMMON_TOKENS; contexts that are cut; greedy text.
    With `policies`, too, what these need is compiled."""
    widest, longest = min(widest, vocab_size), longest - LEVELS
    rows = row_sizes(limits, widest, LEVELS)
    if not rows:
        return

    def candidates() -> Iterator[list[Search]]:
        shared = min(limits.tokens, min(limits.requests, limits.rows) * longest)
        totals = token_rungs(min(COMMON_TOKENS, shared))
        for place in range(max(len(rows), len(totals))):
            size, total = rows[min(place, len(rows) - 1)], totals[min(place, len(totals) - 1)]
            searches = wave(size, widest, total, vocab_size, longest=longest)
            yield searches if may_run(searches, limits) else wave(size, widest, 1, vocab_size)
        for total in token_rungs(min(COMMON_TOKENS, longest)):
            if total > shared:
                yield wave(1, 1, total, vocab_size)
        for size in rows:
            if longest >= SPLIT_CONTEXT and context_splits(size, SPLIT_CONTEXT) > 1:
                yield wave(size, widest, SPLIT_CONTEXT * -(-size // widest), vocab_size, longest=longest)
            yield wave(size, widest, 1, vocab_size, stops=True)
            pair = max(size, 2)  # two at least
            yield wave(pair, min(widest, -(-pair // 2)), 1, vocab_size, levels=(LEVELS, LEVELS - 1))
        yield wave(1, 1, 1, vocab_size, stops=True)
        if policies:
            yield from planned(wave(1, 1, 1, vocab_size))

    yield from (searches for searches in candidates() if may_run(searches, limits))


def prompt_rungs(most: int) -> list[int]:
    """Rungs of prompt tokens that a group can have, with so many at most."""
    return [token_rung(tokens) for tokens in token_rungs(most)]


def most_tokens(limits: WaveLimits, longest: int) -> int:
    """Most prompt tokens of a group that is captured: a prompt over the limit of a wave runs alone."""
    return min(GROUP_TOKENS, max(limits.tokens, longest))


def at_start(tokens: int, largest: int) -> bool:
    """Whether a start captures prompts of so many tokens: of those over COMMON_TOKENS one of eight, and the largest.
    Until the others have graphs these serve them."""
    return tokens <= COMMON_TOKENS or tokens % LARGE_STEP == 0 or tokens == largest


def large_prompts(
    limits: WaveLimits, widest: int, vocab_size: int, longest: int
) -> tuple[list[tuple[Size, list[Search]]], list[tuple[Size, list[Search]]]]:
    """Waves that meet the rungs of prompt tokens over COMMON_TOKENS, the smallest first, each with its size: those for
    the start, and the others."""
    widest, longest = min(widest, vocab_size), longest - LEVELS
    most = most_tokens(limits, longest)
    rungs = prompt_rungs(most)
    first: list[tuple[Size, list[Search]]] = []
    later: list[tuple[Size, list[Search]]] = []
    for tokens in rungs:
        searches = wave(1, widest, min(tokens, most), vocab_size, longest=longest)
        if tokens > COMMON_TOKENS and may_run(searches, limits):
            size = request_rung(len(searches)), tokens, 0
            (first if at_start(tokens, rungs[-1]) else later).append((size, searches))
    return first, later


def reusing(
    limits: WaveLimits, vocab_size: int, longest: int, page_size: int, every: bool
) -> Iterator[tuple[Size | None, list[Search]]]:
    """Waves of prompts whose beginnings, short or long, one before left in ContextKV: `every` rung of new tokens, or up
    to COMMON_TOKENS each, then one of eight and the largest.

    With each its size; None with a prompt that only leaves its pages.
    """
    longest -= LEVELS
    met: set[Size] = set()
    for known in (page_size, -(-SPLIT_CONTEXT // page_size) * page_size):
        if known >= longest:
            return
        beginnings = Beginnings(wave(1, 1, longest, vocab_size)[0], known, page_size)
        if not may_run([beginnings.of(1)], limits):
            return
        yield None, [beginnings.of(1)]
        own = longest - known
        most = min(most_tokens(limits, longest), limits.requests * own)
        rungs = prompt_rungs(most)
        for tokens in rungs:
            if not (every or at_start(tokens, rungs[-1])):
                continue
            full, rest = divmod(min(tokens, most), own)
            parts = [own] * full + [rest] * (rest > 0)
            searches = [replace(beginnings.of(part), num_cached=known) for part in parts]
            size = request_rung(len(searches)), tokens, context_splits(tokens, known)
            if size not in met and may_run(searches, limits):
                met.add(size)
                yield size, searches


class Beginnings:
    """Prompts that begin with the same `known` tokens, which are whole pages."""

    def __init__(self, longest: Search, known: int, page_size: int) -> None:
        self._longest, self._known = longest, known
        self._keys = prefix_keys(longest.token_ids[: known + 1], page_size, SALT)

    def of(self, more: int) -> Search:
        """A prompt with so many tokens behind them."""
        token_ids = self._longest.token_ids[: self._known + more]
        return replace(self._longest, token_ids=token_ids, prefix=Prefix(token_ids, SALT, self._keys))


def may_run(searches: list[Search], limits: WaveLimits) -> bool:
    """Whether the scheduler could form this wave."""
    load = Load.of(searches, limits)
    return load.fits(limits if len(searches) > 1 else replace(limits, tokens=load.tokens))


def planned(searches: list[Search]) -> Iterator[list[Search]]:
    """The wave by each of PLANS."""
    for plan in PLANS:
        yield [replace(search, plan=plan) for search in searches]


def catalog_waves(
    limits: WaveLimits,
    widest: int,
    vocab_size: int,
    catalog: Catalog,
    normalizers: tuple[Normalizer, ...],
    policies: bool = False,
) -> Iterator[list[Search]]:
    """Waves over a catalog, which meet every rung of rows that it can fill, for each of the normalisers; and one with
    filters, so that what they need is compiled, and the same for `policies`."""
    widest, levels = min(widest, vocab_size), (catalog.depth,)
    filled = wave(widest, widest, 1, vocab_size, levels=levels, catalog=catalog)[0].rows
    for size in row_sizes(limits, filled, catalog.depth):
        searches = wave(size, filled, 1, vocab_size, levels=levels, catalog=catalog)
        if may_run(searches, limits):
            yield from ([replace(search, normalizer=name) for search in searches] for name in normalizers)
    one = wave(1, 1, 1, vocab_size, levels=levels, catalog=catalog)
    if may_run(one, limits):
        one = [replace(search, normalizer=normalizers[0]) for search in one]
        mask = ItemMask.everything(catalog.num_items)
        yield [narrowed(search, mask) for search in one]
        if policies:
            yield from planned(one)


def unmet(waves: Iterable[list[Search]], met: set[Hashable], limits: WaveLimits) -> Iterator[list[Search]]:
    """Those waves of which a level runs a graph that is not met yet; from then on it is."""
    for searches in waves:
        graphs = Wave(searches, limits.rows).graphs
        if not graphs <= met:
            met |= graphs
            yield searches


def wave(
    rows: int,
    widest: int,
    tokens: int,
    vocab_size: int,
    *,
    longest: int | None = None,
    levels: tuple[int, ...] = (LEVELS,),
    stops: bool = False,
    catalog: Catalog | None = None,
) -> list[Search]:
    """Searches that have so many rows and at least so many prompt tokens together, and by turns so many levels."""
    count = max(-(-rows // min(widest, vocab_size)), -(-tokens // (longest or tokens)))
    rows, tokens = max(rows, count), max(tokens, count)
    searches = []
    for b in range(count):
        width = rows // count + (b < rows % count)
        widths = bound_widths((width,) * levels[b % len(levels)], catalog, vocab_size)
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
