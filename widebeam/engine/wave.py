"""Requests that are searched together: how wide each level is, which shapes that makes, what is sent to the device.

Everything here is host arithmetic on sizes known before the wave starts. Imports no torch.

Letters: B requests, T prompt tokens, L levels.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from widebeam.constraints.catalog import Catalog
from widebeam.engine.request import Normalizer, Sampling
from widebeam.engine.shapes import (
    LevelShape,
    candidate_rung,
    code_rung,
    context_splits,
    depth_rung,
    request_rung,
    rung,
)
from widebeam.kv.prefix import Prefix
from widebeam.policies import LevelPlan

if TYPE_CHECKING:
    from widebeam.constraints.filters import ItemMask
    from widebeam.kv.context import ContextLease
    from widebeam.ranges import RangeLease

NO_CAP = 1 << 31
"""A cap that no group of candidates reaches."""


@dataclass(eq=False)
class Search:
    """One accepted request as the GPU thread sees it: checked, bounded, ready to run."""

    request_id: str
    token_ids: np.ndarray
    """Prompt, int32 [T]."""
    widths: tuple[int, ...]
    """Beams that can be live after each level, `len(widths)` levels; see `bound_widths`."""
    num_returned: int
    """Sequences that the caller wants back."""
    catalog: Catalog | None
    normalizer: Normalizer
    join: int
    """Candidates considered jointly, as a multiple of the width; see `join_factor`."""
    stop_token_ids: tuple[int, ...]
    length_penalty: float
    sampling: Sampling | None = None
    """Its texts are drawn, independently, as many as are wanted back."""
    special_token_ids: tuple[int, ...] = ()
    """Never to be generated."""
    mask: ItemMask | None = None
    """Items of the catalog that it allows; None: all."""
    plan: LevelPlan | None = None
    """Its policy, if that does more than set widths."""
    top_logprobs: int = 0
    return_beam_details: bool = False
    prefix: Prefix | None = None
    """Under which its prompt may share pages with others; None: with none."""
    keep_until: float | None = None
    """Until when its pages are likely to be used again, monotonic seconds."""
    prefetched: bool = field(default=False)
    """Its pages in the host's memory were looked for."""
    num_cached: int = field(default=0)
    """Its first tokens whose keys and values are there: as looked up while it waits, then as its lease has it."""
    lease: ContextLease | None = field(default=None)

    @property
    def num_new(self) -> int:
        """Tokens that go through the network."""
        return self.num_tokens - self.num_cached

    @property
    def levels(self) -> int:
        return len(self.widths)

    @property
    def is_text(self) -> bool:
        """Its tokens stay as they come: it is drawn, or takes the most probable token each time."""
        greedy = self.num_returned == self.join == 1 and max(self.widths) == 1
        return self.catalog is None and (self.sampling is not None or greedy)

    @property
    def beam_rows(self) -> int:
        """Most beams that are live at once; each holds a BeamKV slot a level."""
        return max((1, *self.widths[:-1]))

    @property
    def rows(self) -> int:
        """Most places that the search holds in the device's buffers: beams, or sequences to return."""
        return max(self.beam_rows, self.num_returned)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def narrowed(search: Search, mask: ItemMask) -> Search:
    """The same search over these items alone: at no level can more rows be live than there are."""
    return replace(search, mask=mask, widths=tuple(min(width, mask.num_allowed) for width in search.widths))


class Wave:
    """A set of searches that share catalog version and normaliser, with their shapes and staged arrays.

    Either all of them are drawn or none.
    """

    def __init__(self, searches: list[Search], max_rows: int) -> None:
        self.searches = searches
        self.catalog = searches[0].catalog
        self.normalizer = searches[0].normalizer
        self.num_levels = max(search.levels for search in searches)
        self.requests = request_rung(len(searches))
        self.max_rows = max_rows
        self.places = rung(sum(search.rows for search in searches), max_rows)
        self.has_stops = any(search.stop_token_ids for search in searches)
        self.sampled = searches[0].sampling is not None
        self.noisy = any(search.plan.noise for search in searches if search.plan)
        self.top_logprobs = max(search.top_logprobs for search in searches)
        self.return_beam_details = any(search.return_beam_details for search in searches)
        self.masks = list(dict.fromkeys(search.mask for search in searches if search.mask is not None))
        """The distinct ones of its searches."""
        self.beam_lease: RangeLease | None = None
        self.mask_lease: RangeLease | None = None
        self._rows = [
            [search.widths[level] if level < search.levels - 1 else 0 for search in searches]
            for level in range(self.num_levels)
        ]
        self._decoded = [0, *(rung(sum(rows), max_rows) for rows in self._rows[:-1])]
        self.shapes = [self._shape(level) for level in range(self.num_levels)]
        self.stride = max(self._decoded)

    @property
    def beam_slots(self) -> int:
        """BeamKV slots that the wave needs: every level but the first writes one for each row that it decodes."""
        return self.stride * (self.num_levels - 1)

    def policy_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The fields of `pruning.Pruning`, `cap_B1`, and the fields of `state.Noise`; each empty if nobody asks."""
        plans = [search.plan or LevelPlan(()) for search in self.searches]
        plans += [LevelPlan(())] * (self.requests + 1 - len(plans))
        pruning, caps, noise = {}, {}, {}
        if any(plan.prunes for plan in plans):
            pruning = {
                "margin_B1": np.array([plan.margin for plan in plans], dtype=np.float64),
                "mass_B1": np.array([plan.mass if plan.mass < 1 else np.inf for plan in plans], dtype=np.float64),
                "floor_B1": np.array([plan.floor for plan in plans], dtype=np.int64),
            }
        if any(plan.cap is not None for plan in plans):
            caps = {"cap_B1": np.array([plan.cap or NO_CAP for plan in plans], dtype=np.int64)}
        if self.noisy:
            noise = {
                "asks_B1": np.array([plan.noise for plan in plans], dtype=np.int64),
                "seed_B1": np.array([plan.seed or 0 for plan in plans], dtype=np.int64),
            }
        return pruning, caps, noise

    @property
    def mask_places(self) -> int:
        """Places that the masks take in their pool."""
        return sum(mask.places for mask in self.masks)

    def mask_arrays(self) -> dict[str, np.ndarray]:
        """Where each request's mask begins, by the name in `trie.Masks`; empty if all allow all items."""
        if not self.masks:
            return {}
        place = self.mask_lease.base if self.mask_lease else 0
        begins: dict[ItemMask | None, int] = {}
        for mask in self.masks:
            begins[mask] = place
            place += mask.places
        place_B1 = np.full(self.requests + 1, -1, dtype=np.int64)
        place_B1[: len(self.searches)] = [begins.get(search.mask, -1) for search in self.searches]
        return {"place_B1": place_B1}

    @property
    def form(self) -> tuple[bool, ...]:
        """Which parts of `advance` run that few searches ask for: filters, what gives beams up, caps, noise, and tokens
        that are never generated."""
        plans = [search.plan for search in self.searches if search.plan is not None]
        prunes, caps = any(plan.prunes for plan in plans), any(plan.cap is not None for plan in plans)
        return bool(self.masks), prunes, caps, self.noisy, any(search.special_token_ids for search in self.searches)

    @property
    def graphs(self) -> set[Hashable]:
        """What its levels and its end run, each as all that its compiled form and its captured graph depend on: sizes,
        and choices that are no data."""
        depth, form = depth_rung(self.num_levels), self.form
        forward: set[Hashable] = {
            ("rows", self.requests, self.decoded(level), self.splits(level), self.shapes[level].depth)
            for level in range(1, self.num_levels)
        }
        return forward | {("advance", shape, depth, form) for shape in self.shapes} | {("pack", self.places, depth)}

    def rows(self, level: int) -> list[int]:
        """Live rows of each request after `level`: those that go on to the next one."""
        return self._rows[level]

    def decoded(self, level: int) -> int:
        """Rows that the network runs on at a level >= 1, padded: those that can be live."""
        return self._decoded[level]

    def splits(self, level: int) -> int:
        """Parts in which attention cuts each context at that level."""
        return context_splits(self.decoded(level), min(search.num_tokens for search in self.searches))

    def _shape(self, level: int) -> LevelShape:
        catalog = self.catalog
        going_on = any(level < search.levels - 1 for search in self.searches)
        ending = any(level == search.levels - 1 for search in self.searches)
        candidates, ranked = self._candidates(level)
        return LevelShape(
            requests=self.requests,
            rows_in=self.requests if level == 0 else self.places,
            rows_out=self.places if going_on else 0,
            finished=self.places,
            depth=depth_rung(level),
            candidates=candidates,
            ranked=ranked,
            codes=code_rung(len(catalog.level_token_ids[level])) if catalog is not None else 0,
            normalizer=self.normalizer,
            finishing=ending or self.has_stops or (catalog is not None and catalog.index.mixed_depth),
            stops=self.has_stops,
        )

    def _candidates(self, level: int) -> tuple[int, int]:
        """`candidates` and `ranked` of LevelShape."""
        if self.catalog is None:
            join = max(search.join for search in self.searches if level < search.levels)
            return join * self.places, join * self.places
        index, B = self.catalog.index, self.requests
        # the widest parents' children count most if the rows divide evenly among all requests that a wave can have
        parents = 1 if level == 0 else -(-self.places // B)
        candidates = candidate_rung(B * index.widest(level, parents))
        return candidates, candidates if index.mixed_depth else self.places

    def width_arrays(self) -> dict[str, np.ndarray]:
        """`widths_LB1` of WaveData, whose size is a rung of levels."""
        widths = np.zeros((depth_rung(self.num_levels), self.requests + 1), dtype=np.int64)
        for b, search in enumerate(self.searches):
            widths[: search.levels, b] = search.widths
        return {"widths_LB1": widths}

    def arrays(self) -> dict[str, np.ndarray]:
        """What else the device needs to know about the wave and its requests, by the names of WaveData and DecodedRows:
        arrays whose sizes follow from B."""
        B, searches = self.requests, self.searches

        def column(values: list[int], dtype: type = np.int64) -> np.ndarray:
            return np.array(values + [0] * (B + 1 - len(values)), dtype=dtype)

        penalty = np.ones(B + 1, dtype=np.float64)
        penalty[: len(searches)] = [search.length_penalty for search in searches]
        return {
            "context_len_B1": column([search.num_tokens for search in searches]),
            "levels_B1": column([search.levels for search in searches]),
            "finished_B1": column([search.num_returned for search in searches]),
            "join_B1": column([search.join for search in searches]),
            "length_penalty_B1": penalty,
            "suppressed_B1": column([bool(search.special_token_ids) for search in searches]),
            "slot_base": np.array(self.beam_lease.base if self.beam_lease else 0, dtype=np.int64),
            "slot_stride": np.array(self.stride, dtype=np.int64),
        }
