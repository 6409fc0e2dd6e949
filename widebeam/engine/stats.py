"""What an engine tells about itself. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec
from msgspec import field

if TYPE_CHECKING:
    from widebeam.engine.budgets import Budgets
    from widebeam.engine.runtime import Runtime
    from widebeam.engine.waiting import Waiting
    from widebeam.engine.worker import Worker

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30)
OUTCOMES = (
    "ok", "cancelled", "aborted", "deadline_exceeded", "invalid_request", "engine_error", "out_of_memory",
    "draining", "engine_dead",
)  # fmt: skip
"""How an accepted request may end: with a result, or with an error of the class that has this code. Of what is invalid,
filters alone are looked at so late."""
HOST_EVENTS = ("saved", "dropped", "restored", "declined", "evicted", "corrupt", "failed")
"""What may happen to pages of the host tier: counts of HostStats."""
COUNTS = tuple(2**power for power in range(9))
"""Requests of a wave: up to 256."""
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Distribution(msgspec.Struct):
    """How often a number was at most so large. Written by one thread, without a lock; may be read on any."""

    bounds: tuple[float, ...]
    """Ascending."""
    counts: list[int] = []
    """Numbers over the last bound and up to this one; the last are those over all bounds."""
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, number: float) -> None:
        self.counts[bisect_left(self.bounds, number)] += 1
        self.sum += number

    def copy(self) -> Distribution:
        return Distribution(self.bounds, list(self.counts), self.sum)


class Distributions(msgspec.Struct):
    """What waves and their searches were like. Written on the GPU thread."""

    wave_requests: Distribution = field(default_factory=lambda: Distribution(COUNTS))
    wave_rows: Distribution = field(default_factory=lambda: Distribution(ROWS))
    wave_prompt_tokens: Distribution = field(default_factory=lambda: Distribution(TOKENS))
    wave_host_seconds: Distribution = field(default_factory=lambda: Distribution(SECONDS))
    """Time of the GPU thread from a wave's jobs to everything launched, for waves of up to 8 levels: longer ones wait
    for the device between pieces."""
    company_wait_seconds: Distribution = field(default_factory=lambda: Distribution(SECONDS))
    """Of those waves for which requests waited while the device was busy anyway, and more of them might come."""
    beam_width: Distribution = field(default_factory=lambda: Distribution(ROWS))
    """Of each search: its widest level, without the beams that cannot exist."""
    prompt_length_tokens: Distribution = field(default_factory=lambda: Distribution(TOKENS))

    def copy(self) -> Distributions:
        return Distributions(**{name: getattr(self, name).copy() for name in self.__struct_fields__})


class EngineStats(msgspec.Struct, kw_only=True):
    """Numbers of one moment; counters run from the engine's start. A request is one prompt here: a batch has many."""

    requests_in_flight: int
    rows_in_flight: int
    row_levels_in_flight: int
    """Rows to decode, over all levels."""
    tokens_in_flight: int
    in_flight_limits: dict[str, int]
    """What the four may be at most, by the budget: requests, rows, row_levels and tokens."""
    requests_waiting: int
    """Of those in flight, the ones that are in no wave yet."""
    rows_waiting: int
    tokens_waiting: int
    requests_running: int
    """Of those in flight, the ones that are in a wave."""
    requests_done: int
    """Answers that came from the GPU thread to somebody who still waited."""
    searches: dict[str, int]
    """Accepted requests by how they ended: ok, or the code of an error's class."""
    requests_refused: int
    requests_refused_by: dict[str, int]
    """By the budget that was full."""
    retry_after_seconds: float
    """The wait that was told last to somebody who was refused; 0 before."""
    waves: int
    waves_by_levels: dict[int, int]
    """By the most levels that their requests may have: 8, and each next one twice as many."""
    waves_closed_by: dict[str, int]
    """By what kept the next request in turn out of the wave; see `scheduler.CLOSED_BY`."""
    waves_passing: int
    """Waves that ran between pieces of a longer one."""
    wave_rows_limit: int
    """Rows that a wave may have: --max-wave-rows, or less for a while after running out of memory."""
    jobs_overtaken: int
    """Requests that had to wait for a wave headed by a younger one, and then ran."""
    jobs_aged: int
    """Those of them that younger ones had held up for as long as is allowed, so that they went first."""
    jobs_dropped: int
    """Requests that left the queue without running: cancelled, or too late."""
    out_of_memory: int
    fallbacks: int
    """Slower ways taken than the device has, such as attention in plain PyTorch on a GPU."""
    late_graphs: int
    """Graphs captured after warm-up, for sizes that it did not meet."""
    ungraphed_prompts: int
    """Groups of prompts launched kernel by kernel, as no graph is for so many tokens."""
    waves_on_device: int
    """Launched and not delivered; one runs, one may lie behind it."""
    beam_rows_in_use: int
    """Of these waves, as are the next two."""
    context_pages_in_use: int
    """What two waves hold one after the other counts for both."""
    beam_slots_in_use: int
    context_pages_leased: int
    """Of the pool, held by searches and copies, each page once; what the prefix cache alone keeps is not. 0 when idle,
    as is the next: whoever has not given back what it held shows here."""
    beam_slots_leased: int
    context_pages: int
    context_pages_high_water: int
    """Most that one wave has held."""
    beam_slots: int
    beam_slots_high_water: int
    catalog_bytes_in_use: int
    """Of the arena: held by catalog versions, and by those let go since the last one came."""
    catalog_bytes: int
    """--catalog-memory-gib."""
    prefix_searches: dict[str, int]
    """Prompts that could share pages, by whether they found any in the prefix cache: hit or miss."""
    prefix_hit_tokens: int
    """Prompt tokens that were not computed again."""
    prefix_restored_tokens: int
    """Those of them that had come back from the host's memory."""
    prefix_miss_tokens: int
    """Prompt tokens that were computed."""
    prefix_evicted_pages: int
    """Cached pages that made room, and next those that a flush dropped."""
    prefix_flushed_pages: int
    prefix_cached_pages: int
    prefix_idle_pages: int
    """Of these, the ones that neither a wave nor a copy holds."""
    prefix_host_events: dict[str, int]
    """Pages of the host tier, by what happened to them, as HostStats says."""
    prefix_host_waits: int
    """Waves for which the host waited until copies let go of pages."""
    prefix_host_pages: int
    prefix_host_bytes: int
    """That these pages take."""
    prefix_host_limit_bytes: int
    prefix_transfer_bytes: dict[str, int]
    """Copied to_host and to_device, and next the time that it took."""
    prefix_transfer_seconds: dict[str, float]
    prefix_restore_bytes_per_second: float
    """From the host to the device, measured at start; next the rate of prefill that it is compared with."""
    prefix_prefill_tokens_per_second: float
    distributions: Distributions


def engine_stats(waiting: Waiting, budgets: Budgets, worker: Worker, runtime: Runtime) -> EngineStats:
    """Put together what the parts of an engine count."""
    in_use, refused, scheduler = budgets.in_use, budgets.refused, worker.scheduler
    jobs, on_device = list(waiting), worker.on_device
    queued = [job.search for job in jobs if job.waiting]
    context, beams, catalogs = runtime.core.context, runtime.core.beams, runtime.core.catalogs
    prefix, host = runtime.prefixes.stats, runtime.prefixes.host_stats
    return EngineStats(
        requests_in_flight=in_use["requests"],
        rows_in_flight=in_use["rows"],
        row_levels_in_flight=in_use["row_levels"],
        tokens_in_flight=in_use["tokens"],
        in_flight_limits=dict(budgets.limits),
        requests_waiting=len(queued),
        rows_waiting=sum(search.rows for search in queued),
        tokens_waiting=sum(search.num_tokens for search in queued),
        requests_running=len(jobs) - len(queued),
        requests_done=waiting.done,
        searches=dict(waiting.ended),
        requests_refused=sum(refused.values()),
        requests_refused_by=dict(refused),
        retry_after_seconds=budgets.retry_after_s,
        waves=sum(scheduler.waves.values()),
        waves_by_levels=dict(scheduler.waves),
        waves_closed_by=dict(scheduler.closed_by),
        waves_passing=scheduler.waves_passing,
        wave_rows_limit=scheduler.rows_limit,
        jobs_overtaken=scheduler.jobs_overtaken,
        jobs_aged=scheduler.jobs_aged,
        jobs_dropped=scheduler.jobs_dropped,
        out_of_memory=worker.out_of_memory,
        fallbacks=runtime.fallbacks,
        late_graphs=runtime.late_graphs,
        ungraphed_prompts=runtime.ungraphed_prompts,
        waves_on_device=len(on_device),
        beam_rows_in_use=sum(load.rows for load in on_device),
        context_pages_in_use=sum(load.pages for load in on_device),
        beam_slots_in_use=sum(load.slots for load in on_device),
        context_pages_leased=context.pages_used,
        beam_slots_leased=beams.used,
        context_pages=context.num_pages,
        context_pages_high_water=context.high_water,
        beam_slots=beams.size,
        beam_slots_high_water=beams.high_water,
        catalog_bytes_in_use=catalogs.used_bytes,
        catalog_bytes=catalogs.size_bytes,
        prefix_searches={"hit": prefix.hit_requests, "miss": prefix.miss_requests},
        prefix_hit_tokens=prefix.hit_tokens,
        prefix_restored_tokens=prefix.restored_tokens,
        prefix_miss_tokens=prefix.miss_tokens,
        prefix_evicted_pages=prefix.evicted_pages,
        prefix_flushed_pages=prefix.flushed_pages,
        prefix_cached_pages=prefix.cached_pages,
        prefix_idle_pages=prefix.idle_pages,
        prefix_host_events={name: getattr(host, name) for name in HOST_EVENTS},
        prefix_host_waits=host.waits,
        prefix_host_pages=host.pages,
        prefix_host_bytes=host.pages * host.page_bytes,
        prefix_host_limit_bytes=host.size_bytes,
        prefix_transfer_bytes={"to_host": host.bytes_to_host, "to_device": host.bytes_to_device},
        prefix_transfer_seconds={"to_host": host.seconds_to_host, "to_device": host.seconds_to_device},
        prefix_restore_bytes_per_second=host.restore_bytes_per_s,
        prefix_prefill_tokens_per_second=host.prefill_tokens_per_s,
        distributions=scheduler.distributions.copy(),
    )
