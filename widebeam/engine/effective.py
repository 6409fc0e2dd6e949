"""What an engine runs with once it has started: its settings as they act, and the lines of the log that say so. Imports
no torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from widebeam.config import changed
from widebeam.engine.recommending import refused_default
from widebeam.faults import counted

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine

log = logging.getLogger(__name__)


def effective_settings(engine: Engine) -> dict[str, Any]:
    """The settings, with what was chosen in the place of what was left open."""
    limits, info = engine._limits, engine.info
    return {
        **msgspec.to_builtins(engine.config),
        "device": str(engine._runtime.device),
        "dtype": info["dtype"],
        "kv_cache_dtype": str(engine._runtime.kv_dtype).removeprefix("torch."),
        "attention_backend": info["backend"],
        "quantization": info["quantization"],
        "max_context_len": engine.max_context_len,
        "max_total_tokens": limits.wave.context_pages * limits.wave.page_size,
        "beam_kv_tokens": limits.wave.beam_slots,
        **{f"max_waiting_{budget}": most for budget, most in limits.budgets.items()},
    }


def log_start(engine: Engine) -> None:
    """What there is to serve with: settings that somebody made, pools, catalogs, and what these cannot do together."""
    wave = engine._limits.wave
    log.info("settings that are not defaults: %s", changed(engine.config))
    log.info(
        "context KV %d pages, %d tokens; beams' KV %d tokens; a wave has up to %d requests, %d prompt tokens, %d rows",
        wave.context_pages, wave.context_pages * wave.page_size, wave.beam_slots, wave.requests, wave.tokens, wave.rows,
    )  # fmt: skip
    for name in engine.catalogs.names():
        catalog = engine.catalogs.get(name)
        assert catalog is not None
        log.info(
            "catalog %r at version %d: %s under %s of up to %s, from %s",
            name, catalog.version, counted(catalog.num_items, "item"), counted(catalog.num_sids, "SID"),
            counted(catalog.depth, "token"), catalog.source,
        )  # fmt: skip
        if why := refused_default(engine, catalog):
            log.warning("recommendations from catalog %r that name no beam_width will be refused: %s", name, why)
