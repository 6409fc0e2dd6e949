"""The whole search, top to bottom: prefill the prompts, take one level after another, send the results home.

Launching runs on the GPU thread only and waits for nothing, except one flag after every PIECE levels of a long search,
where shorter waves may pass it; the results are read back by whoever waits for them. Everything lies in one stream, so
that the next wave may be launched, and may reuse what this one held, before the device has run it.

Letters: T packed prompt tokens, B requests, R rows, F finished sequences, L levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from widebeam.constraints.arena import DeviceTrie
from widebeam.constraints.trie import Masks
from widebeam.engine.core import Core
from widebeam.engine.flight import Clock, LaunchedWave
from widebeam.engine.growth import Growth
from widebeam.engine.packing import collect, growing
from widebeam.engine.pruning import Pruning
from widebeam.engine.sampling import draws_of, sample
from widebeam.engine.shapes import GROUP_TOKENS, context_splits, token_rung
from widebeam.engine.staging import to_device
from widebeam.engine.state import DecodedRows, Noise, PackedPrompts, WaveData
from widebeam.engine.step import Reuse, prompt_body, prompt_last
from widebeam.engine.trace import Trace
from widebeam.engine.wave import Search, Wave

Arrays = dict[str, np.ndarray]
PIECE = 8
"""Levels that are launched without a look at what else there is."""


class Between(NamedTuple):
    """What a long wave asks between two pieces."""

    wanted: Callable[[], bool] = lambda: True
    """Whether any of its requests still has a taker."""
    others_wait: Callable[[], bool] = lambda: False
    """Whether shorter waves wait that could run now."""
    run_others: Callable[[], None] = lambda: None
    """Launch them. They find all buffers free but the pages and slots that are leased."""
    grown: Callable[[Growth], None] | None = None
    """Takes the texts of a wave as they are, if somebody follows them."""


ALONE = Between()


@torch.inference_mode()
def launch_wave(core: Core, wave: Wave, trie: DeviceTrie | None, between: Between) -> LaunchedWave:
    """Search all requests of a wave."""
    clock = Clock(core.state.level.device)
    clock.mark()
    launch_prompts(core, wave)  # first, so that the device is busy while the rest is prepared
    data = wave_data(core, wave)
    send_masks(core, wave)
    trace = Trace(core, wave, data) if wave.top_logprobs or wave.return_beam_details else None
    select = selection(core, wave, data, trie, trace)
    select(0)
    clock.mark()
    cut_short = launch_levels(core, wave, data, select, between, clock)
    clock.mark()
    home, traced = collect(core, wave), trace.collect() if trace else None
    clock.mark()
    return LaunchedWave(wave.searches, cut_short, clock, home, traced)


def selection(
    core: Core, wave: Wave, data: WaveData, trie: DeviceTrie | None, trace: Trace | None
) -> Callable[[int], None]:
    """What turns the hidden states of a level's rows into the next level's rows."""
    draws = draws_of(wave, core.model.config.vocab_size, core.state.level.device) if wave.sampled else None

    def select(level: int) -> None:
        here = trie.level(level, core.state.brought) if trie else None
        if trace:
            trace.before(level, here)
        if draws:
            sample(core, data, draws, wave.shapes[level], level)
        else:
            core.programs.advance(core, data, here, wave.shapes[level])
        if trace:
            trace.after(level)

    return select


def launch_levels(
    core: Core, wave: Wave, data: WaveData, select: Callable[[int], None], between: Between, clock: Clock
) -> bool:
    """All levels but the first; whether some were left out because nobody wanted the results any more."""
    planned: tuple[int, list[int]] | None = None
    for level in range(1, wave.num_levels):
        if level % PIECE == 0:
            if not between.wanted():
                return True
            if not bool((core.state.cum_R[: wave.decoded(level)] > -torch.inf).any()):
                break
            if between.grown:
                between.grown(Growth(wave, level, clock, collect(core, wave), growing(core, wave, level)))
            if between.others_wait():
                put_back = core.state.set_aside(wave.requests, wave.places, wave.num_levels, wave.noisy)
                between.run_others()
                put_back()
                wave_data(core, wave)  # others may have brought theirs to the same place
                planned = None
        shape, widths, rows, splits = wave.shapes[level], wave.rows(level - 1), wave.decoded(level), wave.splits(level)
        plan, handle = core.plans.context(shape.requests, rows, splits)
        if planned != (handle, widths):
            plan.plan(widths, *contexts(wave.searches))
            planned = (handle, widths)
        core.programs.forward_rows(core, data.rows, rows, rows * splits, shape.depth, handle)
        select(level)
    return False


def launch_prompts(core: Core, wave: Wave) -> None:
    """Prefill, in groups of prompts whose products are large enough: beyond that cuBLAS has worse kernels on an H200.

    A group runs as two graphs, of its size or a larger one; if there are none, kernel by kernel, which the host
    launches as fast as the device runs only if they are large.
    """
    programs, state = core.programs, core.state
    for group in prompt_groups(wave.searches):
        searches = group.searches
        rows, splits, graphed = group_size(core, wave.requests, searches)
        arrays, tokens = prompt_arrays(core, wave, group, rows)
        staged = state.brought.put(arrays, tokens) if graphed else to_device(arrays | tokens, state.level.device)
        prompts = PackedPrompts(**staged)
        lengths = [search.num_new for search in searches]
        body, last = (programs.body, programs.last) if graphed else (prompt_body, prompt_last)
        plan, handle = core.plans.prefill(wave.requests, rows if graphed else None)
        plan.plan(lengths, rows)
        reuse = plan_prefixes(core, wave.requests, rows, splits, searches) if splits else None
        last(core, prompts, body(core, prompts, handle, reuse))


class Group(NamedTuple):
    """Prompts that go through the network together."""

    places: list[int]
    """Of each in the wave."""
    searches: list[Search]


def prompt_groups(searches: list[Search]) -> Iterator[Group]:
    """First the prompts that are computed whole, then those that begin in ContextKV: attention over what is there
    already would cost the others as much. A group has at most GROUP_TOKENS new tokens, or is one prompt with more."""
    for continued in (False, True):
        group, tokens = Group([], []), 0
        for place, search in enumerate(searches):
            if bool(search.num_cached) != continued:
                continue
            if group.searches and tokens + search.num_new > GROUP_TOKENS:
                yield group
                group, tokens = Group([], []), 0
            group.places.append(place)
            group.searches.append(search)
            tokens += search.num_new
        if group.searches:
            yield group


def group_size(core: Core, requests: int, searches: list[Search]) -> tuple[int, int, bool]:
    """Rows of a group of prompts, padded to those of its graph, or to a rung where a plan is kept for it; in how many
    parts attention cuts what of them is in ContextKV already, 0 if nothing is; and whether graphs replay it."""
    total, shortest = sum(search.num_new for search in searches), min(search.num_cached for search in searches)
    padded = token_rung(total)
    splits = context_splits(padded, shortest) if shortest else 0
    rung = core.programs.rung(requests, total, splits)
    return rung or (padded if splits else total), splits, rung is not None


def plan_prefixes(core: Core, requests: int, rows: int, splits: int, searches: list[Search]) -> Reuse:
    """How the rows of a group's prompts see what of them is in ContextKV already."""
    S = core.context.page_size
    plan, handle = core.plans.context(requests, rows, splits, beside=True)
    pages = [search.lease.pages[: search.num_cached // S] if search.lease else [] for search in searches]
    plan.plan([search.num_new for search in searches], [search.num_cached for search in searches], pages)
    return Reuse(handle, rows * splits)


def prompt_arrays(core: Core, wave: Wave, group: Group, rows: int) -> tuple[Arrays, Arrays]:
    """The fields of PackedPrompts for a group of the wave's searches: those of one size, and tokens, padded to so many
    rows."""
    B, searches = wave.requests, group.searches
    first_B1, cached_B, length_B = (np.zeros(size, dtype=np.int64) for size in (B + 1, B, B))
    row_B = np.full(B, core.state.hidden_RH.shape[0] - 1, dtype=np.int64)
    tokens_T, pages_BN = np.zeros(rows, dtype=np.int64), np.zeros((B, core.max_pages), dtype=np.int32)
    start = 0
    for b, (place, search) in enumerate(zip(group.places, searches, strict=True)):
        end, pages = start + search.num_new, search.lease.pages if search.lease else []
        tokens_T[start:end] = search.token_ids[search.num_cached :]
        pages_BN[b, : len(pages)] = pages
        cached_B[b], length_B[b], row_B[b] = search.num_cached, search.num_tokens, place
        first_B1[b + 1 :] = start = end
    return {
        "first_B1": first_B1, "cached_B": cached_B, "length_B": length_B, "row_B": row_B, "pages_BN": pages_BN,
        "num_requests": np.array(len(wave.searches), dtype=np.int64),
    }, {"tokens_T": tokens_T}  # fmt: skip


def stop_arrays(wave: Wave) -> dict[str, np.ndarray]:
    """Every stop token of every request: request and token."""
    pairs = [(b, token) for b, search in enumerate(wave.searches) for token in search.stop_token_ids]
    request, token = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return {"stop_B": request, "stop_token": token}


def wave_data(core: Core, wave: Wave) -> WaveData:
    """The wave's device arrays; stop tokens become a table, so that looking one up costs no loop over them."""
    brought, arrays, widths = core.state.brought, wave.arrays(), wave.width_arrays()
    masks, (pruning, caps, noise) = wave.mask_arrays(), wave.policy_arrays()
    staged = brought.put(arrays, widths | masks | pruning | caps | noise)
    stop_BV = None
    if wave.has_stops:
        stops = to_device(stop_arrays(wave), core.state.level.device)
        stop_BV = brought.zeros("stop_BV", (wave.requests + 1, core.model.config.vocab_size), np.bool_)
        stop_BV[stops["stop_B"], stops["stop_token"]] = True
    special = next((search.special_token_ids for search in wave.searches if search.special_token_ids), ())
    rows = DecodedRows(*(staged[name] for name in DecodedRows._fields))
    return WaveData(
        rows=rows,
        stop_BV=stop_BV,
        special_S=brought.put({"special_S": np.array(special, dtype=np.int64)})["special_S"] if special else None,
        pruning=Pruning(**{name: staged[name] for name in pruning}) if pruning else None,
        cap_B1=staged.get("cap_B1"),
        noise=Noise(**{name: staged[name] for name in noise}) if noise else None,
        masks=Masks(staged["place_B1"], core.masks.words, core.masks.before) if masks else None,
        **{name: staged[name] for name in arrays | widths if name not in DecodedRows._fields},
    )


def send_masks(core: Core, wave: Wave) -> None:
    """Put the wave's masks where its lease says."""
    if wave.masks and wave.mask_lease is not None:
        core.masks.put(wave.masks, wave.mask_lease.base)


def contexts(searches: list[Search]) -> tuple[list[int], list[list[int]]]:
    """Length and pages of each request's context."""
    pages = [search.lease.pages if search.lease else [] for search in searches]
    return [search.num_tokens for search in searches], pages
