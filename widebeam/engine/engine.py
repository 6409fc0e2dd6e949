"""The engine as servers and notebooks use it: how it starts, drains and ends. Knows nothing of HTTP.

Lives on one asyncio event loop; the device belongs to the worker's thread. Admission, cancellation and deadlines are
decided on the loop, without touching the device.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import msgspec

from widebeam.config import EngineConfig, convert
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.catalogs import Catalogs, catalog_files
from widebeam.constraints.codebooks import Vocabulary
from widebeam.engine.blocking import Blocking
from widebeam.engine.budgets import Budgets
from widebeam.engine.effective import effective_settings, log_start
from widebeam.engine.job import Outcome
from widebeam.engine.limits import Limits
from widebeam.engine.live_catalogs import LiveCatalogs
from widebeam.engine.prompts import Prompts
from widebeam.engine.ranks import Ranks, torchrun_place
from widebeam.engine.recommending import Recommending
from widebeam.engine.runtime import Runtime
from widebeam.engine.searching import Searching
from widebeam.engine.spawn import Followers
from widebeam.engine.staged_catalogs import StagedCatalogs
from widebeam.engine.startup import check_division, choose_device, longest_context
from widebeam.engine.stats import EngineStats, engine_stats
from widebeam.engine.waiting import Waiting
from widebeam.engine.watchdog import Watchdog
from widebeam.engine.worker import Worker
from widebeam.errors import ConfigError, Draining, EngineDead, EngineError, NotReady, RequestError, StartupError
from widebeam.kv.eviction import EVICTION
from widebeam.model.config import ModelConfig, load_model_config
from widebeam.model.tokenizer import Tokenizer
from widebeam.model.weights import resolve_checkpoint
from widebeam.policies import POLICIES

T = TypeVar("T")
State = Literal["starting", "ready", "draining", "stopped", "dead"]


class Engine(Searching, Recommending, Blocking):
    """A model, its catalogs and a queue of searches.

    `Engine("path/to/model", catalog="items.parquet")`, or an EngineConfig. Use it as an asynchronous context manager,
    or call the blocking `generate`, which starts it by itself.
    """

    def __init__(self, config: EngineConfig | str, **settings: Any) -> None:
        super().__init__()
        base = {"model": config} if isinstance(config, str) else msgspec.to_builtins(config)
        self.config: EngineConfig = convert(base | settings, EngineConfig)
        self.catalogs = Catalogs(self.config.catalog_history, self.config.default_catalog)
        self.live: LiveCatalogs
        """How catalogs change. From when the engine has started."""
        self.staged: StagedCatalogs
        """How several engines change one together. From then, too."""
        self.state: State = "starting"
        self._may_start = True
        """Nobody has started it, or what was tried failed before the model was loaded."""
        self.model_config: ModelConfig
        self.max_context_len = 0
        self._prompts = Prompts(None)
        self._limits: Limits
        self._budgets: Budgets
        self._worker: Worker
        self._watchdog: Watchdog
        self.died: asyncio.Event
        """Set when the device or its thread has broken for good: nothing is searched any more."""
        self._runtime: Runtime
        self._followers: Followers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting = Waiting()

    # Life cycle

    async def start(self) -> None:
        """Load everything; returns when the engine can search. Raises StartupError, and EngineDead if it starts or has
        started already."""
        if not self._may_start:
            raise EngineDead(f"the engine is {self.state}: one starts only once, make another")
        self._may_start = loaded = False
        self.state = "starting"  # also after a start that failed
        self._loop = asyncio.get_running_loop()
        self.died = asyncio.Event()
        try:
            files = catalog_files(self.config.catalog, self.config.default_catalog)
            for registry in (POLICIES, EVICTION):
                await asyncio.to_thread(registry.discover)
            self._check_eviction()
            folder = await asyncio.to_thread(self._read_checkpoint)
            size, tokenizer = self.model_config.vocab_size, self.tokenizer
            deepest = min(self.config.max_levels, self.max_context_len - 1)
            vocabulary = Vocabulary(tokenizer.token_id if tokenizer else None, size)
            self.live = LiveCatalogs(self.catalogs, vocabulary, deepest, self._make_searchable)
            self.staged = StagedCatalogs(self.catalogs, self.live)
            read = [await self.live.read(file, name) for name, file in files.items()]  # a wrong one ends the start now
            self._worker = Worker(lambda: self._build(folder), self._deliver, self._on_death)
            self._watchdog = Watchdog(lambda: self._worker.busy, self.config.hang_timeout_s, self._worker.give_up)
            if self.config.tensor_parallel_size > 1 and torchrun_place(self.config) is None:
                self._followers = Followers(self.config, folder, self._worker.give_up)
                await asyncio.to_thread(self._followers.start)
            self._worker.start()
            self._watchdog.start()
            self._runtime = await self._when_ready()
            loaded = True
            self._limits = Limits.of(
                self.config, self.model_config, self.tokenizer, self.max_context_len, self._runtime.limits
            )
            self._budgets = Budgets(self._limits.budgets)
            self._limits.warn()
            while read:  # which holds the catalogs
                await self.live.change(read.pop(0))
            self.catalogs.none_is_first()
            if self.config.watch_catalogs:
                self.live.watch(self.config.watch_interval_s)
            if self.state != "starting":
                raise EngineDead("the engine was stopped while it started")
        except BaseException:
            await self.stop()
            self._may_start = not loaded
            raise
        log_start(self)
        self.state = "ready"

    def _read_checkpoint(self) -> Path:
        folder = resolve_checkpoint(self.config.model, self.config.revision)
        self.model_config = load_model_config(folder)
        self._prompts = Prompts(Tokenizer.load(folder))
        self.max_context_len = longest_context(self.config, self.model_config)
        check_division(self.config, self.model_config)
        return folder

    def _build(self, folder: Path) -> Runtime:
        """On the GPU thread."""
        ranks, place = None, self._followers.place if self._followers else torchrun_place(self.config)
        if place is not None:
            ranks = Ranks(place, self.config, choose_device(self.config.device).type == "cuda")
        try:
            return Runtime(self.config, folder, self.model_config, self.max_context_len, ranks)
        except BaseException:
            if ranks is not None:
                ranks.leave()
            raise

    async def _when_ready(self) -> Runtime:
        """Wait for the GPU thread. Raises StartupError if another rank ends meanwhile."""
        ready, died = asyncio.wrap_future(self._worker.ready), asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait((ready, died), return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
        if not ready.done():
            ready.cancel()
            raise StartupError("another rank of the model has ended while it started; it says why")
        return ready.result()

    def _check_eviction(self) -> None:
        """Raise ConfigError for an eviction policy that nobody offers."""
        try:
            EVICTION.get(self.config.prefix_cache_eviction)
        except (KeyError, EngineError) as error:
            raise ConfigError(f"--prefix-cache-eviction: {error.args[0]}") from None

    async def load_catalog(self, path: str | Path, name: str | None = None) -> Catalog:
        """Read a catalog file and offer it to requests. Raises CatalogError; see `live` for other ways to change."""
        return await self.live.load(path, name)

    async def _make_searchable(self, catalog: Catalog) -> None:
        """Put a catalog version on the device while waves run; the GPU thread only finds room for it, and warms up
        what is new about it. Raises CatalogError."""
        await asyncio.wrap_future(self._worker.call(lambda runtime: runtime.reserve(catalog)))
        await asyncio.to_thread(self._runtime.upload, catalog)
        await asyncio.wrap_future(self._worker.call(lambda runtime: runtime.add_catalog(catalog)))

    @staticmethod
    def freeze() -> None:
        """For a process that does nothing but serve from now on: what lives now lives for ever, and is not looked at
        again by full collections of garbage, each of which would stop every thread for 0.2 s."""
        gc.collect()
        gc.freeze()

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those accepted are still answered."""
        if self.state == "ready":
            self.state = "draining"

    async def stop(self) -> None:
        """End the worker. Whatever waits, or is in the middle of a long search, is answered with Draining."""
        if self.state != "dead":
            self.state = "stopped"
            self._waiting.answer_all(Draining("the server was stopped before this search had ended", retry_after_s=1.0))
        if hasattr(self, "live"):
            self.live.close()
        if hasattr(self, "_worker"):
            self._worker.stop()
            await asyncio.to_thread(self._worker.join)
            self._watchdog.stop()
        if self._followers is not None:
            await asyncio.to_thread(self._followers.close)
        self._prompts.close()

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # Text

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, if it has one."""
        return self._prompts.tokenizer

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text, made off the event loop."""
        return await self._prompts.encode(text)

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a chat by the checkpoint's template, made off the event loop."""
        return await self._prompts.render_chat(messages, **options)

    async def use_tokenizer(self, function: Callable[[Tokenizer], T]) -> T:
        """What a function makes with the tokenizer, off the event loop. Raises InvalidRequest without a tokenizer."""
        return await self._prompts.use(function)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; empty without a tokenizer."""
        return self._prompts.decode(ids, skip_special_tokens=skip_special_tokens)

    # State

    def stats(self) -> EngineStats:
        """Numbers of this moment. Cheap; may be called while waves run."""
        return engine_stats(self._waiting, self._budgets, self._worker, self._runtime)

    @property
    def info(self) -> dict[str, str]:
        """The model, and what was chosen for it at start: dtype, device, attention backend and quantisation."""
        return {"model": self.config.model, **self._runtime.info}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as they act: what was left to be chosen is what was chosen. Once the engine is ready."""
        return effective_settings(self)

    async def flush_prefixes(self) -> None:
        """Nothing that was computed for prompts so far is used again. Waits for the wave that is launched."""
        self._check_ready()
        await asyncio.wrap_future(self._worker.call(lambda runtime: runtime.prefixes.flush()))

    async def check_integrity(self) -> None:
        """Raises RuntimeError if anything leaks. Waits for the wave that runs."""
        await asyncio.wrap_future(self._worker.call(lambda runtime: runtime.check_integrity()))

    def _check_ready(self) -> None:
        if self.state == "ready":
            return
        errors: dict[str, RequestError] = {
            "starting": NotReady(
                "the engine is starting" if self._loop else "the engine was not started: enter it by `async with`",
                retry_after_s=1.0,
            ),
            "draining": Draining("the server is shutting down", retry_after_s=1.0),
            "stopped": EngineDead("the engine has stopped"),
            "dead": EngineDead("the GPU thread died"),
        }
        raise errors[self.state]

    def _deliver(self, outcomes: list[Outcome]) -> None:
        """Called on the GPU thread: one wake-up of the loop for a whole wave."""
        self._on_loop(self._waiting.resolve, outcomes)

    def _on_death(self) -> None:
        """Called on any thread."""
        self.state = "dead"
        self._on_loop(self._answer_everybody)

    def _on_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Have the event loop call this, if it still runs."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _answer_everybody(self) -> None:
        self._waiting.answer_all(EngineDead("the GPU thread died"))
        self.died.set()
