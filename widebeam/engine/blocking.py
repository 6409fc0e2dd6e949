"""The engine without asyncio: for notebooks, scripts and benchmarks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, TypeVar, cast

from widebeam.blocking import LoopClosed, LoopThread
from widebeam.engine.admission import make_params
from widebeam.engine.request import SearchResult
from widebeam.errors import EngineDead, InvalidRequest, Overloaded

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine

Prompt = str | Seq[int]
T = TypeVar("T")


class Blocking:
    """Runs an engine's coroutines on an event loop of its own, and starts the engine when first needed.

    May be shared by threads: the first call starts the engine, and those that come meanwhile wait for that.
    """

    _loop: asyncio.AbstractEventLoop | None

    def __init__(self) -> None:
        self._thread: LoopThread | None = None
        """While the engine runs on it."""
        self._failure: Exception | None = None
        """Of the last start that failed."""
        self._changing = threading.RLock()
        """Held by a start and by a close. A signal's handler may close in the middle of either."""

    def generate(self, prompt: Prompt | Seq[Prompt], **params: Any) -> SearchResult | list[SearchResult]:
        """Search and block until done. Raises RequestError; one failing prompt fails all.

        `prompt` is a text, a list of token ids, or a list of either; `params` are the fields of SearchParams.
        """
        if len(prompt) == 0:
            raise InvalidRequest("the prompt is empty", code="empty_prompt", param="prompt")
        engine = cast("Engine", self)
        single = isinstance(prompt, str) or isinstance(prompt[0], int)
        prompts: list[Any] = [prompt] if single else list(prompt)
        wanted = make_params(params)

        async def one(item: Prompt, gate: asyncio.Semaphore) -> SearchResult:
            async with gate:
                tokens = await engine.encode(item) if isinstance(item, str) else item
                while True:
                    try:
                        return await engine.submit(tokens, wanted)
                    except Overloaded as full:  # of the batch's own searches
                        await asyncio.sleep(full.retry_after_s or 0.0)

        async def all_of_them() -> list[SearchResult]:
            gate = asyncio.Semaphore(engine.config.max_waiting_requests)
            tasks = [asyncio.ensure_future(one(item, gate)) for item in prompts]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

        results = self.run(all_of_them())
        return results[0] if single else results

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Block until a coroutine of this engine is done: `engine.run(engine.recommend(..))`.

        An engine that runs on somebody's event loop already refuses: await there.
        """
        try:
            thread = self._thread or self._start_once()
        except BaseException:
            coroutine.close()
            raise
        try:
            return thread.run(coroutine)
        except LoopClosed:
            raise EngineDead("the engine has stopped") from None

    def close(self) -> None:
        """Stop an engine that `run` or `generate` started, or is starting; their calls on other threads fail."""
        with self._changing:
            thread = self._thread
            if thread is not None:
                thread.run(cast("Engine", self).stop())
                thread.close()
                self._thread = self._loop = None

    def _start_once(self) -> LoopThread:
        """The thread of an engine that runs. Raises what its start does, also where another thread's call made it."""
        before = self._failure
        with self._changing:
            if self._thread is not None:
                return self._thread
            if self._failure is not None and self._failure is not before:
                raise self._failure
            if self._loop is not None:
                raise RuntimeError("this engine runs on an event loop already: await there")
            thread = LoopThread("widebeam-engine")
            try:
                thread.run(cast("Engine", self).start())
            except BaseException as error:
                thread.close()
                self._loop = None
                if isinstance(error, Exception):  # after an interrupt of this thread alone, the next one tries
                    self._failure = error
                raise
            self._thread = thread
            return thread
