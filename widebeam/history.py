"""Histories whose beginning holds still, so that what a server computed of one is of use for the next. Needs no torch.

history = anchored_history(events, limit=64, block=16)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def anchored_history(events: Sequence[T], limit: int, block: int, *, offset: int = 0) -> list[T]:
    """The newest of a user's `events` (oldest first), from a multiple of `block` on, at most `limit`.

    Events are counted from the user's first one, 0. The result starts at the smallest multiple of `block` that leaves
    at most `limit`: at 0 while there are no more than `limit`, later so that `limit - block + 1` to `limit` are kept.
    The start moves once in `block` events; until it does, each history continues the one before. With a `block` of 1
    it moves at every event: the plain window of the `limit` newest.

    A caller that holds only the newest events says in `offset` how many came before the first of them. The result is
    the same as for all events; the `limit` newest are enough. Raises ValueError if `limit` or `block` is below 1,
    `block` over `limit`, `offset` below 0, or the events begin after the start.
    """
    for name, value, least in (("limit", limit, 1), ("block", block, 1), ("offset", offset, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    if block > limit:
        raise ValueError(f"block must be at most limit ({limit}), not {block}")
    surplus = max(0, offset + len(events) - limit)
    start = -(-surplus // block) * block
    if start < offset:
        raise ValueError(
            f"the history starts at event {start}, but those given begin at offset {offset}: give the {limit} newest"
        )
    return list(events[start - offset :])
