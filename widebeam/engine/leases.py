"""What waves hold: pages of prompts, beam slots, places of masks. On the GPU thread."""

from __future__ import annotations

from widebeam.engine.core import Core
from widebeam.engine.wave import Wave


def acquire(core: Core, wave: Wave) -> None:
    """Reserve everything that the wave will need. The scheduler has counted, so a shortage is a bug."""
    wanted = [(search.num_tokens, search.prefix) for search in wave.searches]
    leases = core.context.acquire_together(wanted)
    if leases is None and core.tier is not None:
        core.tier.make_room()
        leases = core.context.acquire_together(wanted)
    for search, lease in zip(wave.searches, leases or (), strict=leases is not None):
        search.lease, search.num_cached = lease, lease.num_cached
    if core.tier is not None:
        core.tier.begin_wave(leases or ())
    wave.beam_lease = core.beams.acquire(wave.beam_slots)
    wave.mask_lease = core.masks.acquire(wave.mask_places)
    if None in (wave.beam_lease, wave.mask_lease) or any(search.lease is None for search in wave.searches):
        raise RuntimeError("the scheduler formed a wave that the pools cannot hold")


def release(core: Core, wave: Wave, keep: bool) -> None:
    """Give back what the wave holds of that. `keep`: what its prompts left in ContextKV may be used again."""
    if core.tier is not None:
        core.tier.end_wave([search.lease for search in wave.searches if search.lease is not None])
    for search in wave.searches:
        if search.lease is not None:
            prefix = search.lease.prefix
            core.context.release(search.lease, keep, search.keep_until)
            search.lease = None
            if core.tier is not None and keep and prefix is not None:
                core.tier.offer(prefix, search.keep_until)
    if wave.beam_lease is not None:
        core.beams.release(wave.beam_lease)
        wave.beam_lease = None
    if wave.mask_lease is not None:
        core.masks.release(wave.mask_lease)
        wave.mask_lease = None
