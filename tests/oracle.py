"""Beam search written as plainly as it can be: Python lists, every candidate enumerated, one sort.

Independent of the engine: nothing here shares code with it. It takes log-probabilities as a function of the prefix, in
whatever precision the caller likes: float64 to judge a whole search, float32 to demand exactly equal selections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """One returned sequence."""

    tokens: Prefix
    cum: float
    score: float
    reason: str


@dataclass
class Answer:
    """Sequences best first, and the smallest difference between a candidate that was taken and one that was not."""

    found: list[Found]
    margin: float


def beam_search(
    logprobs: Callable[[Prefix], Sequence[float]],
    vocab: Sequence[int],
    widths: Sequence[int],
    n: int,
    *,
    items: set[Prefix] | None = None,
    stops: frozenset[int] = frozenset(),
    greedy: bool = False,
    final_score: Callable[[float, int], float] = lambda cum, length: cum / length,
    zero: float = 0.0,
    stay: Callable[[list[float]], int] = len,
    cap: int | None = None,
) -> Answer:
    """`logprobs(prefix)[token]` for any prefix; `items` are the legal whole sequences; the rest as in SearchParams.

    `stay`: of a level's beams, given by their scores, so many of the best go on. `cap`: of a level's candidates, and of
    the results, only the best so many of each first token count.
    """
    live: list[tuple[Prefix, float]] = [((), zero)]
    finished: list[Found] = []
    margin = float("inf")
    for level, width in enumerate(widths):
        last = level == len(widths) - 1
        candidates = []
        for rank, (prefix, cum) in enumerate(live):
            table = logprobs(prefix)
            for token in legal(prefix, vocab, items):
                candidates.append((-(cum + table[token]), rank, token))
        candidates.sort()
        candidates = within(cap, candidates, lambda one, live=live: (*live[one[1]][0], one[2])[0])
        considered = len(candidates)
        if items is None or last:
            considered = width if last or greedy or not stops else 2 * width
        margin = min(margin, gap(candidates, considered), gap(candidates, width))
        survivors: list[tuple[Prefix, float]] = []
        ended: list[tuple[int, Found]] = []  # with their place among the candidates
        places: list[int] = []  # of the survivors
        for place, (negative, rank, token) in enumerate(candidates[:considered]):
            sequence, cum = (*live[rank][0], token), -negative
            room = len(survivors) < width
            reason = ending(sequence, items, stops, last, greedy)
            if reason and room:
                ended.append((place, Found(sequence, cum, final_score(cum, len(sequence)), reason)))
            if not last and goes_on(sequence, items, stops) and room:
                survivors.append((sequence, cum))
                places.append(place)
        live = survivors
        if stops and not last and len(survivors) < width and len(candidates) >= considered:
            for place, (sequence, cum) in zip(places, survivors, strict=True):
                ended.append((place, Found(sequence, cum, final_score(cum, len(sequence)), "length")))
            live = []
        live = live[: stay([cum for _, cum in live])]
        finished += [one for _, one in sorted(ended, key=lambda pair: pair[0])]
    finished.sort(key=lambda one: -one.score)
    finished = within(cap, finished, lambda one: one.tokens[0])
    scores = [(-one.score,) for one in finished]
    return Answer(finished[:n], min(margin, gap(scores, n)))


def within(cap: int | None, ranked: list[T], group: Callable[[T], int]) -> list[T]:
    """The first `cap` of each group, in their order."""
    if cap is None:
        return ranked
    taken: Counter[int] = Counter()
    kept = []
    for one in ranked:
        taken[group(one)] += 1
        if taken[group(one)] <= cap:
            kept.append(one)
    return kept


def legal(prefix: Prefix, vocab: Sequence[int], items: set[Prefix] | None) -> list[int]:
    """Tokens that may follow."""
    if items is None:
        return sorted(vocab)
    k = len(prefix)
    return sorted({item[k] for item in items if len(item) > k and item[:k] == prefix})


def ending(sequence: Prefix, items: set[Prefix] | None, stops: frozenset[int], last: bool, greedy: bool) -> str | None:
    """Why the sequence would end here, if it can. At the last level beams are not looked at for stop tokens."""
    if items is not None:
        return "item" if sequence in items else None
    if sequence[-1] in stops and (greedy or not last):
        return "stop"
    return "length" if last else None


def goes_on(sequence: Prefix, items: set[Prefix] | None, stops: frozenset[int]) -> bool:
    """Whether anything may follow."""
    if items is None:
        return sequence[-1] not in stops
    return any(len(item) > len(sequence) and item[: len(sequence)] == sequence for item in items)


def gap(ranked: Sequence[tuple[float, ...]], cut: int) -> float:
    """Difference in score across a cut: a tiny one means that rounding may choose either side."""
    if not 0 < cut < len(ranked):
        return float("inf")
    return ranked[cut][0] - ranked[cut - 1][0]


def assert_same(returned: list[Found], expected: list[Found], eps: float) -> None:
    """Equal sequences and scores, but for the order among scores within eps of each other."""
    assert len(returned) == len(expected)
    by_tokens = {one.tokens: one for one in expected}
    assert {one.tokens for one in returned} == set(by_tokens), "different sequences"
    for place, (mine, theirs) in enumerate(zip(returned, expected, strict=True)):
        twin = by_tokens[mine.tokens]
        assert abs(mine.score - twin.score) <= eps, f"score of {mine.tokens}"
        assert abs(mine.score - theirs.score) <= 2 * eps, f"order at place {place}"
        assert mine.reason == twin.reason
