"""How large the KV pools are, decided once, before the first request.

On a GPU by measurement: weights are loaded, the rooms of catalogs and filters are taken, the longest prompt and the
most rows run once eagerly for their peak, and the context pool takes what is left of the allowed share. On a CPU by the
settings alone: memory is only touched when pages are used.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable

import torch

from widebeam.config import EngineConfig
from widebeam.constraints.arena import CatalogArena, MaskPool
from widebeam.engine.needs import Needs
from widebeam.engine.pool_sizes import PoolSizes
from widebeam.errors import ConfigError
from widebeam.kv.copies import PageCopies
from widebeam.model.config import ModelConfig

log = logging.getLogger(__name__)


def measured_sizes(needs: Needs, largest_waves: Callable[[PoolSizes], None], graphs: bool) -> PoolSizes:
    """Run `largest_waves` on the least pools, then give the context pool what memory is left. Raises ConfigError.

    With `graphs` the work space counts twice: what they captured is theirs alone.
    """
    config, device, least = needs.config, needs.device, needs.least
    page_bytes, beam_bytes = needs.page_bytes, needs.beam_bytes
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    largest_waves(least)
    work_bytes = torch.cuda.max_memory_allocated(device) - base - least.context_pages * page_bytes - beam_bytes
    work_bytes *= 2 if graphs else 1
    gc.collect()
    torch.cuda.empty_cache()
    left = needs.require(base - needs.before + work_bytes + beam_bytes + least.context_pages * page_bytes)
    pages = least.context_pages + (left // page_bytes if config.max_total_tokens is None else 0)
    needs.context_pages = pages
    log.info(
        "weights, catalogs and filters %.2f GiB, work space %.2f, beams' KV %.2f, context KV %.2f (%d tokens)",
        base / 2**30, work_bytes / 2**30, beam_bytes / 2**30, pages * page_bytes / 2**30, pages * config.page_size,
    )  # fmt: skip
    return PoolSizes(pages, least.beam_slots)


def make_rooms(config: EngineConfig, device: torch.device) -> tuple[CatalogArena, MaskPool]:
    """Those of catalogs and masks: taken before the KV pools, which get what is left."""
    return (
        CatalogArena(int(config.catalog_memory_gib * 2**30), device),
        MaskPool(int(config.filter_memory_gib * 2**30), device),
    )


def make_host_pages(
    config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, device: torch.device
) -> PageCopies | None:
    """The prefix cache's room in the host's memory, with two small buffers on the device; None: there is to be none.

    Made before the KV pools, which get what is left. Raises ConfigError.
    """
    gib = config.prefix_cache_host_gib
    if not gib:
        return None
    if config.prefix_cache == "off":
        raise ConfigError(
            f"--prefix-cache-host-gib {gib:g} is for pages of the prefix cache, and there is none: say "
            f"--prefix-cache on, or leave it at 0"
        )
    layer_bytes = config.page_size * model.kv_elements_per_token * kv_dtype.itemsize // (2 * model.num_layers)
    page_bytes = 2 * model.num_layers * layer_bytes
    num_pages, memory = int(gib * 2**30) // page_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not num_pages or num_pages * page_bytes > memory:
        raise ConfigError(
            f"--prefix-cache-host-gib {gib:g} must be from {page_bytes / 2**30:.3g}, for a page of --page-size "
            f"{config.page_size} tokens, to {memory / 2**30:.4g}, all that the host has"
        )
    try:
        copies = PageCopies(model.num_layers, layer_bytes, num_pages, device, config.check_host_pages)
    except torch.OutOfMemoryError:  # of the device
        raise
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"--prefix-cache-host-gib {gib:g}: so much cannot be pinned, lower it: {why}") from None
    log.info(
        "%.2f GiB of the host's memory hold %d tokens, which come back at %.1f GB/s",
        num_pages * page_bytes / 2**30, num_pages * config.page_size, copies.bytes_per_s / 1e9,
    )  # fmt: skip
    return copies
