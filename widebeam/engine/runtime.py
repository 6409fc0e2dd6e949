"""What lives on the device: the model, the pools, the search state. Built and used on the GPU thread only."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from widebeam.config import EngineConfig
from widebeam.constraints.catalog import Catalog
from widebeam.engine import warmup
from widebeam.engine.captures import Captures
from widebeam.engine.compile import EAGER, compiled_programs, graphed, tuned
from widebeam.engine.core import Core
from widebeam.engine.flight import Flight
from widebeam.engine.job import Job, Outcome
from widebeam.engine.kv_scales import choose_scales
from widebeam.engine.leader import Leader
from widebeam.engine.leases import acquire, release
from widebeam.engine.memory import make_host_pages, make_rooms, measured_sizes
from widebeam.engine.pool_sizes import PoolSizes
from widebeam.engine.prefixes import Prefixes
from widebeam.engine.ranks import Ranks
from widebeam.engine.request import Normalizer
from widebeam.engine.scheduler import WaveLimits
from widebeam.engine.search import ALONE, Between, launch_wave
from widebeam.engine.shapes import GROUP_TOKENS, request_rung, token_rung
from widebeam.engine.startup import Ground, choose_ground
from widebeam.engine.state import BeamState
from widebeam.engine.wave import Search, Wave
from widebeam.errors import ConfigError, OutOfMemory
from widebeam.kv.beam import BeamKV
from widebeam.kv.context import ContextKV
from widebeam.kv.host import HostTier
from widebeam.kv.prefix_cache import PrefixCache
from widebeam.model.attention import Plans
from widebeam.model.config import ModelConfig
from widebeam.model.parallel import WHOLE
from widebeam.model.weights import fingerprint, load_model

log = logging.getLogger(__name__)


class Runtime:
    """The device side of an engine."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        model_config: ModelConfig,
        max_context_len: int,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks`: which this is of several, of which each makes a runtime. Raises StartupError."""
        shard = WHOLE if ranks is None else ranks.shard
        self._leader = Leader(ranks) if ranks is not None and shard.rank == 0 else None
        self.config = config
        model_config = self._model_config = shard.config(model_config)
        self._max_context_len = max_context_len
        if config.max_wave_rows < config.max_beam_width:
            raise ConfigError(
                f"--max-wave-rows {config.max_wave_rows} is less than --max-beam-width {config.max_beam_width}"
            )
        started = time.perf_counter()
        ground = choose_ground(config, model_config, max_context_len, shard.rank)
        self.device, self.dtype, self.kv_dtype, self._needs = ground.device, ground.dtype, ground.kv_dtype, ground.needs
        self._fallbacks = ground.fallbacks
        self.info = ground.info
        """What was chosen, in words."""
        if ranks is not None:
            settings = msgspec.structs.replace(config, model="")  # which may lie elsewhere on another machine
            ranks.agree({"the checkpoint's config": model_config, "settings": settings, "what they can do": self.info})
        self.prefixes: Prefixes
        self._captures: Captures | None = None
        with self._needs.explained():
            self._load(folder, ground, ranks, started)

    def _load(self, folder: Path, ground: Ground, ranks: Ranks | None, started: float) -> None:
        """Put everything on the device, and warm up. Raises StartupError."""
        config, model_config, max_context_len = self.config, self._model_config, self._max_context_len
        shard, backend = WHOLE if ranks is None else ranks.shard, ground.backend
        self._model = load_model(folder, model_config, self.dtype, self.device, fp8=ground.fp8, shard=shard)
        if ranks is not None:
            ranks.agree({"the checkpoint's weights": fingerprint(self._model)})
        self._catalogs, self._masks = make_rooms(config, self.device)
        host_pages = make_host_pages(config, model_config, self.kv_dtype, self.device)
        self._compiles = self.device.type == "cuda" and not config.enforce_eager
        if self._compiles and not backend.replayable:
            log.warning("nothing is compiled or captured: the attention backend can do neither")
            self._compiles, self._fallbacks = False, self._fallbacks + 1
        self._plans = Plans(backend)
        self._scales = choose_scales(self._model, self._plans, max_context_len) if self.kv_dtype != self.dtype else ()
        requests = request_rung(config.max_wave_requests)
        rows = max(config.max_wave_rows, requests)
        self._state = BeamState(
            rows, requests, config.max_levels, GROUP_TOKENS, model_config.hidden_size, self.dtype, self.device
        )
        if self.device.type == "cuda":
            sizes = measured_sizes(self._needs, self._run_largest_waves, graphs=self._compiles)
            sizes = replace(sizes, context_pages=shard.least(sizes.context_pages, self.device))
        else:
            sizes = self._needs.least
        self.core = self._with_pools(sizes)
        if self._compiles:
            self.core.programs = compiled_programs(self.core, tuned if config.warmup == "full" else graphed)
        log.info("model on %s in %s, loaded in %.1f s", self.device, self.dtype, time.perf_counter() - started)
        if self._compiles and shard.rank == 0:  # the others capture what it runs
            self._captures = Captures(self.core, self.limits, config.warmup, self._run_searches)
            widest, vocab_size = config.max_beam_width, model_config.vocab_size
            self._captures.start(widest, vocab_size, max_context_len, self._warms_up_policies)
        self.prefixes = Prefixes(self.core)
        if host_pages is not None:
            self.core.tier = HostTier(self.core.context, host_pages, config.prefix_cache_eviction)

    def _with_pools(self, sizes: PoolSizes) -> Core:
        config, model = self.config, self._model_config
        kept = config.prefix_cache == "on"
        cache = PrefixCache(config.page_size, config.prefix_cache_eviction) if kept else None
        context = ContextKV(
            model, sizes.context_pages, config.page_size, self.kv_dtype, self.device, cache, self._scales
        )
        beams = BeamKV(model, sizes.beam_slots, self.dtype, self.device)
        max_pages = -(-self._max_context_len // config.page_size)
        rooms = (self._catalogs, self._masks)
        return Core(self._model, context, beams, self._state, self._plans, EAGER, *rooms, max_pages)

    @property
    def limits(self) -> WaveLimits:
        """What one wave may hold."""
        return self._limits_of(self.core)

    def _limits_of(self, core: Core) -> WaveLimits:
        config = self.config
        return WaveLimits(
            requests=config.max_wave_requests,
            tokens=config.max_wave_tokens,
            rows=config.max_wave_rows,
            context_pages=core.context.num_pages,
            beam_slots=core.beams.size,
            mask_places=core.masks.size,
            page_size=config.page_size,
        )

    def reserve(self, catalog: Catalog) -> None:
        """Find room for a catalog version. Raises CatalogError, naming the setting that is too small."""
        self.core.masks.check_room(catalog)
        try:
            self.core.catalogs.reserve(catalog)
        except torch.OutOfMemoryError as error:
            why = self._needs.why(error)
            raise OutOfMemory(f"the GPU has no room for the codebooks of catalog {catalog.name!r}: {why}") from None
        if self._leader is not None:
            self._leader.reserve(self.core, catalog)

    def upload(self, catalog: Catalog) -> None:
        """Bring it there while waves run, which takes a while. The one method for another thread than the GPU's."""
        self.core.catalogs.upload(catalog)
        if self._leader is not None:
            self._leader.upload(catalog)

    def add_catalog(self, catalog: Catalog) -> None:
        """Make a catalog version searchable, for as long as somebody holds the catalog.

        What `reserve` and `upload` have not done yet is done now. Then waves over it warm up what no earlier version
        or catalog has met, which is mostly nothing. Raises CatalogError and OutOfMemory.
        """
        self.reserve(catalog)
        self.upload(catalog)
        if self._captures is None:
            return
        normalizers: tuple[Normalizer, ...] = ("level", "legal", "vocab")
        used = normalizers if self.config.warmup == "full" else normalizers[:1]
        limits, vocab_size, policies = self.limits, self._model_config.vocab_size, self._warms_up_policies
        waves = warmup.catalog_waves(limits, self.config.max_beam_width, vocab_size, catalog, used, policies)
        try:
            self._captures.add(waves)
        except torch.OutOfMemoryError as error:
            why = self._needs.why(error)
            torch.cuda.empty_cache()
            raise OutOfMemory(f"the GPU has no room for the graphs of catalog {catalog.name!r}: {why}") from None

    @property
    def _warms_up_policies(self) -> bool:
        return self.config.warmup_policies or self.config.warmup == "full"

    def capture_more(self) -> bool:
        """For when nobody waits: see Captures.capture_more."""
        return self._captures is not None and self._captures.capture_more()

    @property
    def fallbacks(self) -> int:
        """Slower ways taken than this device has, each kind logged once."""
        return self._fallbacks + (self._captures.fallbacks if self._captures else 0)

    @property
    def late_graphs(self) -> int:
        """Graphs captured after warm-up, for sizes that it did not meet."""
        return self._captures.late_graphs if self._captures else 0

    @property
    def ungraphed_prompts(self) -> int:
        """Groups of prompts launched kernel by kernel, as no graph is for so many tokens."""
        return self._captures.ungraphed_prompts if self._captures else 0

    def _run_searches(self, searches: list[Search]) -> list[Outcome]:
        return self.run([Job(search, time.monotonic(), None) for search in searches])

    def launch(self, jobs: list[Job], stopping: Callable[[], bool] = lambda: False, between: Between = ALONE) -> Flight:
        """Start one wave, without waiting for it.

        What it holds is free again at once: whatever takes it next runs behind this wave. `stopping` is asked between
        pieces of a long search; once it is true the wave ends early. `between` may launch shorter waves there.
        """
        started = time.monotonic()
        wave = Wave([job.search for job in jobs], self.config.max_wave_rows)

        def wanted() -> bool:
            return not stopping() and any(job.wanted(time.monotonic()) for job in jobs)

        launched = None
        try:
            acquire(self.core, wave)
            trie = self.core.catalogs.trie(wave.catalog) if wave.catalog is not None else None
            between = between._replace(wanted=wanted)
            with self._captures.around(wave) if self._captures else nullcontext():
                if self._leader is None:
                    launched = launch_wave(self.core, wave, trie, between)
                else:
                    with self._leader.launching(self.core, wave):
                        launched = launch_wave(self.core, wave, trie, self._leader.telling(between))
        finally:
            release(self.core, wave, keep=launched is not None)
        if self.core.tier is not None:
            self.core.tier.save()
        if self._captures:
            self._captures.note()
        return Flight(jobs, launched, started, stopping)

    def run(self, jobs: list[Job]) -> list[Outcome]:
        """Search one wave and wait for it: exactly one outcome for each job."""
        return self.launch(jobs).outcomes()

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self._leader is not None:
            self._leader.stop()

    def check_integrity(self) -> None:
        """No page, slot or place of a mask may be held between waves. Raises RuntimeError."""
        core = self.core
        for pool in (core.context, core.beams, core.catalogs, core.masks):
            pool.check_integrity()
        in_flight = 0
        if core.tier is not None:
            core.tier.check_integrity()
            in_flight = core.tier.pages_in_flight
        if core.context.pages_used != in_flight or core.beams.used or core.masks.used:
            raise RuntimeError(
                f"{core.context.pages_used - in_flight} pages, {core.beams.used} beam slots and {core.masks.used} "
                f"places of masks are held when idle"
            )

    def _run_largest_waves(self, sizes: PoolSizes) -> None:
        """The most tokens that run together, and the most rows that one wave can have, on pools made for this alone."""
        config, vocab_size = self.config, self._model_config.vocab_size
        core = self._with_pools(sizes)
        limits = self._limits_of(core)
        longest = self._max_context_len
        tokens = max(min(config.max_wave_tokens, GROUP_TOKENS, limits.requests * longest), longest)
        # the largest plans before all others: a backend whose room grows with them has it once, as each keeps its own
        requests = request_rung(limits.requests)
        if self._compiles:
            self._plans.prefill(requests, token_rung(min(tokens, GROUP_TOKENS)))
        if core.context.cache is not None:
            self._plans.context(requests, token_rung(tokens), 1, beside=True)
        prompts = -(-tokens // longest)
        room = (sizes.context_pages + 1 - prompts) * config.page_size  # all but one may leave a page unfilled
        tokens = min(tokens, room)
        rows = warmup.row_sizes(limits, min(config.max_beam_width, vocab_size), 2)[-1]
        for searches in (
            warmup.wave(1, 1, tokens, vocab_size, levels=(2,), longest=longest),
            warmup.wave(rows, config.max_beam_width, 1, vocab_size, levels=(2,), stops=True),
        ):
            wave = Wave(searches, config.max_wave_rows)
            try:
                acquire(core, wave)
                launch_wave(core, wave, None, ALONE).result()
            finally:
                release(core, wave, keep=False)
        del core
        gc.collect()
