"""What lives on the device: the model, the pools, the search state. Built and used on the GPU thread only."""

from __future__ import annotations

import gc
import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

import torch
from tqdm import tqdm

from widebeam.config import EngineConfig
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.trie import DeviceTrie
from widebeam.engine import warmup
from widebeam.engine.compile import (
    EAGER,
    Made,
    captured_at_once,
    compiled_programs,
    graphed,
    keep_trie_in_place,
    made_so_far,
    tuned,
)
from widebeam.engine.core import Core
from widebeam.engine.flight import Flight
from widebeam.engine.memory import PoolSizes, least_sizes, measured_sizes, require_room_for_weights
from widebeam.engine.request import Normalizer
from widebeam.engine.scheduler import Job, Outcome, WaveLimits
from widebeam.engine.search import ALONE, Between, launch_wave
from widebeam.engine.shapes import COMMON_TOKENS, GROUP_TOKENS, request_rung
from widebeam.engine.startup import choose_device, choose_dtype, make_backend, spare_cublas_workspace
from widebeam.engine.state import BeamState
from widebeam.engine.wave import Search, Wave
from widebeam.errors import ConfigError, OutOfMemory
from widebeam.kv.beam import BeamKV
from widebeam.kv.context import ContextKV
from widebeam.model.attention import Plans
from widebeam.model.config import ModelConfig
from widebeam.model.fp8 import wants_fp8
from widebeam.model.weights import load_model, weight_bytes

log = logging.getLogger(__name__)


class Runtime:
    """The device side of an engine."""

    def __init__(self, config: EngineConfig, folder: Path, model_config: ModelConfig, max_context_len: int) -> None:
        self.config = config
        self.device = choose_device(config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            spare_cublas_workspace()
        self.dtype = choose_dtype(config.dtype, model_config.dtype, self.device)
        self._made: Made | None = None
        self._told = False
        self._forms: set[Hashable] = set()
        self.late_graphs = 0
        """Graphs captured after warm-up, for sizes that it did not meet."""
        self._model_config = model_config
        self._max_context_len = max_context_len
        self._tries: weakref.WeakKeyDictionary[Catalog, DeviceTrie] = weakref.WeakKeyDictionary()
        if config.max_wave_rows < config.max_beam_width:
            raise ConfigError(
                f"--max-wave-rows {config.max_wave_rows} is less than --max-beam-width {config.max_beam_width}"
            )
        started = time.perf_counter()
        fp8 = wants_fp8(config.quantization, model_config, self.dtype, self.device)
        needed = weight_bytes(model_config, self.dtype, fp8=fp8)
        require_room_for_weights(needed, self.device, config.gpu_memory_utilization)
        pages = -(-max(config.max_wave_tokens, max_context_len) // config.page_size) + config.max_wave_requests
        backend, self.fallbacks = make_backend(config, model_config, pages, self.dtype, self.device)
        """Slower ways taken than this device has, each kind logged once."""
        self.info = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "backend": backend.name,
            "quantization": "fp8" if fp8 else "none",
        }
        """What was chosen, in words."""
        self._model = load_model(folder, model_config, self.dtype, self.device, fp8=fp8)
        self._compiles = self.device.type == "cuda" and not config.enforce_eager
        if self._compiles and not backend.replayable:
            log.warning("nothing is compiled or captured: the attention backend can do neither")
            self._compiles, self.fallbacks = False, self.fallbacks + 1
        self._plans = Plans(backend)
        requests = request_rung(config.max_wave_requests)
        rows = max(config.max_wave_rows, requests)
        self._state = BeamState(
            rows, requests, config.max_levels, GROUP_TOKENS, model_config.hidden_size, self.dtype, self.device
        )
        if self.device.type == "cuda":
            sizes = measured_sizes(
                config,
                model_config,
                max_context_len,
                self.dtype,
                self.device,
                self._run_largest_waves,
                graphs=self._compiles,
            )
        else:
            sizes = least_sizes(config, max_context_len)
        self.core = self._with_pools(sizes)
        if self._compiles:
            self.core.programs = compiled_programs(self.core, tuned if config.warmup == "full" else graphed)
        log.info("model on %s in %s, loaded in %.1f s", self.device, self.dtype, time.perf_counter() - started)
        vocab_size = model_config.vocab_size
        self._warm_up(warmup.waves(self.limits, config.max_beam_width, vocab_size, max_context_len, COMMON_TOKENS))
        self._rarer = deque(warmup.large_prompts(self.limits, config.max_beam_width, vocab_size, max_context_len))
        while config.warmup == "full" and self.capture_more():
            pass

    def _with_pools(self, sizes: PoolSizes) -> Core:
        config, model = self.config, self._model_config
        context = ContextKV(model, sizes.context_pages, config.page_size, self.dtype, self.device)
        beams = BeamKV(model, sizes.beam_slots, self.dtype, self.device)
        return Core(self._model, context, beams, self._state, self._plans, EAGER)

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
            beam_slots=core.beams.num_slots,
            page_size=config.page_size,
        )

    def add_catalog(self, catalog: Catalog) -> None:
        """Put a catalog version on the device, where it stays for as long as somebody holds the catalog."""
        if catalog not in self._tries:
            try:
                trie = DeviceTrie(catalog, self._model.head_VH, self.config.max_wave_requests)
            except torch.OutOfMemoryError:
                raise OutOfMemory(f"the GPU has no room for catalog {catalog.name!r} beside what it holds") from None
            if self._compiles:
                keep_trie_in_place(trie)
            self._tries[catalog] = trie
            normalizers: tuple[Normalizer, ...] = ("level", "legal", "vocab")
            used = normalizers if self.config.warmup == "full" else normalizers[:1]
            limits, vocab_size = self.limits, self._model_config.vocab_size
            self._warm_up(warmup.catalog_waves(limits, self.config.max_beam_width, vocab_size, catalog, used))

    def _warm_up(self, waves: Iterable[list[Search]]) -> None:
        """Run these waves, so that what they need is compiled and captured; from then on, more is a fallback."""
        if not self._compiles or self.config.warmup == "none":
            return
        started, self._made = time.perf_counter(), None
        planned = list(waves)
        for searches in tqdm(
            planned, desc="compiling and capturing", unit="wave", disable=not sys.stderr.isatty(), file=sys.stderr
        ):
            forms = warmup.forms(Wave(searches, self.config.max_wave_rows))
            jobs = [Job(search, time.monotonic(), None) for search in searches]
            if not forms <= self._forms:
                self._forms |= forms
                self.run(jobs)
            with captured_at_once():
                self.run(jobs)
        self._made = made_so_far(self.device)
        log.info("warm-up: %d waves in %.1f s, %s", len(planned), time.perf_counter() - started, self._made)

    def capture_more(self) -> bool:
        """Capture prompts of one more size, if there is one left, for up to half a second: for when nobody waits.

        There are too many sizes over COMMON_TOKENS for a quick start. Until then they are launched kernel by kernel.
        """
        if self._made is None or not self._rarer:
            return False
        (tokens, searches), self._made = self._rarer.popleft(), None
        sizes = self.core.programs.graphed_tokens
        sizes.add(tokens)
        try:
            with captured_at_once():
                self.run([Job(search, time.monotonic(), None) for search in searches])
        except torch.AcceleratorError:
            raise
        except Exception as error:  # out of memory, above all
            log.warning("prompts of %d tokens and more stay without graphs: %s", tokens, error)
            sizes.discard(tokens)
            self._rarer.clear()
        self._made = made_so_far(self.device)
        return True

    def _note_what_was_made(self) -> None:
        """Count graphs that were compiled or captured although warm-up was over, and log the first of the former.

        Compiling takes seconds and is a fallback; capturing takes about as long as the wave, once for its sizes.
        """
        if self._made is None or (made := made_so_far(self.device)) == self._made:
            return
        self.late_graphs += made.captured - self._made.captured
        fallbacks = made.compiled + made.skipped - self._made.compiled - self._made.skipped
        if fallbacks and not self._told:
            log.warning("a wave had a form that warm-up did not meet, which costs seconds once: %s", made)
            self._told = True
        self.fallbacks, self._made = self.fallbacks + fallbacks, made

    def launch(self, jobs: list[Job], stopping: Callable[[], bool] = lambda: False, between: Between = ALONE) -> Flight:
        """Start one wave, without waiting for it.

        What it holds is free again at once: whatever takes it next runs behind this wave. `stopping` is asked between
        pieces of a long search; once it is true the wave ends early. `between` may launch shorter waves there.
        """
        started = time.monotonic()
        wave = Wave([job.search for job in jobs], self.config.max_wave_rows)

        def wanted() -> bool:
            return not stopping() and any(job.wanted(time.monotonic()) for job in jobs)

        try:
            self._acquire(self.core, wave)
            trie = self._tries[wave.catalog] if wave.catalog is not None else None
            launched = launch_wave(self.core, wave, trie, between._replace(wanted=wanted))
        finally:
            self._release(self.core, wave)
        self._note_what_was_made()
        return Flight(jobs, launched, started, stopping)

    def run(self, jobs: list[Job]) -> list[Outcome]:
        """Search one wave and wait for it: exactly one outcome for each job."""
        return self.launch(jobs).outcomes()

    def check_integrity(self) -> None:
        """No page or slot may be held between waves. Raises RuntimeError."""
        self.core.context.check_integrity()
        self.core.beams.check_integrity()
        if self.core.context.pages_used or self.core.beams.slots_used:
            raise RuntimeError(
                f"{self.core.context.pages_used} pages and {self.core.beams.slots_used} beam slots are held when idle"
            )

    @staticmethod
    def _acquire(core: Core, wave: Wave) -> None:
        """Reserve everything that the wave will need. The scheduler has counted, so a shortage is a bug."""
        for search in wave.searches:
            search.lease = core.context.acquire(search.num_tokens)
        wave.beam_lease = core.beams.acquire(wave.beam_slots)
        if wave.beam_lease is None or any(search.lease is None for search in wave.searches):
            raise RuntimeError("the scheduler formed a wave that the KV pools cannot hold")

    @staticmethod
    def _release(core: Core, wave: Wave) -> None:
        for search in wave.searches:
            if search.lease is not None:
                core.context.release(search.lease)
                search.lease = None
        if wave.beam_lease is not None:
            core.beams.release(wave.beam_lease)
            wave.beam_lease = None

    def _run_largest_waves(self, sizes: PoolSizes) -> None:
        """The most tokens that run together, and the most rows that one wave can have, on pools made for this alone."""
        config, vocab_size = self.config, self._model_config.vocab_size
        core = self._with_pools(sizes)
        limits = self._limits_of(core)
        tokens = max(min(config.max_wave_tokens, GROUP_TOKENS), self._max_context_len)
        rows = warmup.row_sizes(limits, min(config.max_beam_width, vocab_size), 2)[-1]
        for searches in (
            warmup.wave(1, 1, min(tokens, sizes.context_pages * config.page_size), vocab_size, levels=(2,)),
            warmup.wave(rows, config.max_beam_width, 1, vocab_size, levels=(2,), stops=True),
        ):
            wave = Wave(searches, config.max_wave_rows)
            try:
                self._acquire(core, wave)
                launch_wave(core, wave, None, ALONE).result()
            finally:
                self._release(core, wave)
        del core
        gc.collect()
