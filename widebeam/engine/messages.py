"""What the leader of several ranks tells the others, as typed bytes, and waves in that form.

A follower runs the waves that the leader runs, on the same pages, slots and places: it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from widebeam.constraints.filters import ItemMask
from widebeam.engine.request import Normalizer, Sampling
from widebeam.engine.shapes import Size
from widebeam.engine.wave import Search, Wave
from widebeam.kv.context import ContextLease
from widebeam.policies import LevelPlan
from widebeam.ranges import RangeLease

if TYPE_CHECKING:
    from widebeam.constraints.catalog import Catalog

DType = Literal["<i4", "<i8"]
Range = tuple[int, int]
"""Base and count of a RangeLease."""


class SearchPart(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a Search that a wave reads, and of its lease."""

    tokens: bytes
    """int32"""
    widths: tuple[int, ...]
    num_returned: int
    join: int
    stop_token_ids: tuple[int, ...]
    length_penalty: float
    sampling: Sampling | None
    special_token_ids: tuple[int, ...]
    mask: int | None
    """Its place among those of the wave."""
    plan: LevelPlan | None
    top_logprobs: int
    return_beam_details: bool
    pages: list[int]
    num_cached: int


class Launch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run a wave."""

    searches: list[SearchPart]
    catalog: int | None
    """By its number."""
    normalizer: Normalizer
    masks: list[bytes]
    """uint64 words of each."""
    beams: Range
    places: Range
    """Of the masks."""
    graphed: list[Size] | None
    """What prompts are replayed by graphs from now on; None: as before."""
    at_once: bool
    """What is captured now is not run before: see compile.captured_at_once."""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the leader decided between two pieces of a long wave."""

    yes: bool


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A catalog version has a range of the arena. Its codebooks follow, int64."""

    number: int
    name: str
    range: Range
    living: list[int]
    """Versions that are not let go, by number."""


class Nodes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What follows are the arrays of a catalog version's index."""

    number: int
    mixed_depth: bool


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The leader has ended in order."""


Message = Launch | Answer | Reserve | Nodes | Stop


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A message, and the types and sizes of the arrays that follow it."""

    message: Message
    arrays: list[tuple[DType, int]]


def launch_message(wave: Wave, catalog: int | None, graphed: list[Size] | None, at_once: bool) -> Launch:
    """A wave that has its leases."""
    masks = {mask: place for place, mask in enumerate(wave.masks)}
    return Launch(
        searches=[_part(search, masks) for search in wave.searches],
        catalog=catalog,
        normalizer=wave.normalizer,
        masks=[mask.words.tobytes() for mask in wave.masks],
        beams=_range(wave.beam_lease),
        places=_range(wave.mask_lease),
        graphed=graphed,
        at_once=at_once,
    )


def wave_of(message: Launch, catalog: Catalog | None, max_rows: int) -> Wave:
    """The wave again, on the same leases, which nobody releases."""
    num_items = catalog.num_items if catalog is not None else 0
    masks = [ItemMask(np.frombuffer(bytearray(words), np.uint64), num_items) for words in message.masks]
    wave = Wave([_search(part, message.normalizer, catalog, masks) for part in message.searches], max_rows)
    wave.beam_lease, wave.mask_lease = RangeLease(*message.beams), RangeLease(*message.places)
    return wave


def _range(lease: RangeLease | None) -> Range:
    assert lease is not None
    return lease.base, lease.count


def _part(search: Search, masks: dict[ItemMask, int]) -> SearchPart:
    assert search.lease is not None
    return SearchPart(
        tokens=search.token_ids.astype("<i4").tobytes(),
        widths=search.widths,
        num_returned=search.num_returned,
        join=search.join,
        stop_token_ids=search.stop_token_ids,
        length_penalty=search.length_penalty,
        sampling=search.sampling,
        special_token_ids=search.special_token_ids,
        mask=None if search.mask is None else masks[search.mask],
        plan=search.plan,
        top_logprobs=search.top_logprobs,
        return_beam_details=search.return_beam_details,
        pages=search.lease.pages,
        num_cached=search.num_cached,
    )


def _search(part: SearchPart, normalizer: Normalizer, catalog: Catalog | None, masks: Sequence[ItemMask]) -> Search:
    token_ids = np.frombuffer(part.tokens, "<i4")
    return Search(
        request_id="",
        token_ids=token_ids,
        widths=part.widths,
        num_returned=part.num_returned,
        catalog=catalog,
        normalizer=normalizer,
        join=part.join,
        stop_token_ids=part.stop_token_ids,
        length_penalty=part.length_penalty,
        sampling=part.sampling,
        special_token_ids=part.special_token_ids,
        mask=None if part.mask is None else masks[part.mask],
        plan=part.plan,
        top_logprobs=part.top_logprobs,
        return_beam_details=part.return_beam_details,
        num_cached=part.num_cached,
        lease=ContextLease(part.pages, len(token_ids), part.num_cached),
    )
