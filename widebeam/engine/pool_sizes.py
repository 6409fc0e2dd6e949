"""How large the KV pools are at least, by the settings alone. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from widebeam.config import EngineConfig

BEAM_LEVELS = 4
"""Decoded tokens of each row of a full wave that the beam pool holds by default."""


@dataclass(frozen=True)
class PoolSizes:
    """Pages of the context pool and slots of the beam pool."""

    context_pages: int
    beam_slots: int


def least_sizes(config: EngineConfig, max_context_len: int) -> PoolSizes:
    """Pools that hold one full wave or one longest prompt: the least that is useful, and the CPU's default."""
    tokens = config.max_total_tokens or max(config.max_wave_tokens, max_context_len)
    slots = config.beam_kv_tokens or BEAM_LEVELS * config.max_wave_rows
    return PoolSizes(-(-tokens // config.page_size), slots)
