"""What an engine tells about itself."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, kw_only=True):
    """Numbers of one moment; counters run from the engine's start."""

    requests_in_flight: int
    rows_in_flight: int
    row_levels_in_flight: int
    """Rows to decode, over all levels."""
    tokens_in_flight: int
    requests_waiting: int
    """Of those in flight, the ones that are in no wave yet."""
    rows_waiting: int
    tokens_waiting: int
    requests_done: int
    requests_refused: int
    requests_refused_by: dict[str, int]
    """By the budget that was full: requests, rows, row_levels or tokens."""
    retry_after_seconds: float
    """The wait that was told last to somebody who was refused; 0 before."""
    waves: int
    waves_by_levels: dict[int, int]
    """By the most levels that their requests may have: 8, and each next one twice as many."""
    wave_rows_limit: int
    """Rows that a wave may have: --max-wave-rows, or less for a while after running out of memory."""
    jobs_overtaken: int
    """Requests that had to wait for a wave headed by a younger one, and then ran."""
    jobs_aged: int
    """Those of them that younger ones had held up for as long as is allowed, so that they went first."""
    out_of_memory: int
    fallbacks: int
    """Slower ways taken than the device has, such as attention in plain PyTorch on a GPU."""
    context_pages: int
    context_pages_used: int
    context_pages_high_water: int
    beam_slots: int
    beam_slots_used: int
    beam_slots_high_water: int
