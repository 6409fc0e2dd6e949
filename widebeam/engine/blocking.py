"""The engine without asyncio: for notebooks, scripts and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, TypeVar, cast

from widebeam.blocking import LoopThread
from widebeam.engine.admission import make_params
from widebeam.engine.request import SearchResult
from widebeam.errors import InvalidRequest, Overloaded

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine

Prompt = str | Seq[int]
T = TypeVar("T")


class Blocking:
    """Runs an engine's coroutines on an event loop of its own, and starts the engine when first needed."""

    _thread: LoopThread | None = None
    _loop: asyncio.AbstractEventLoop | None

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
        if self._thread is None:
            if self._loop is not None:
                coroutine.close()
                raise RuntimeError("this engine runs on an event loop already: await there")
            self._thread = LoopThread("widebeam-engine")
            try:
                self._thread.run(cast("Engine", self).start())
            except BaseException:
                coroutine.close()
                self._end_thread()
                raise
        return self._thread.run(coroutine)

    def close(self) -> None:
        """Stop an engine that `run` or `generate` started."""
        if self._thread is not None:
            self._thread.run(cast("Engine", self).stop())
            self._end_thread()

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.close()
        self._thread = self._loop = None
