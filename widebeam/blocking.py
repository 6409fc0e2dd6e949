"""Blocking calls into asynchronous code: one event loop on a private thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

T = TypeVar("T")


class LoopClosed(RuntimeError):
    """The loop was closed before a coroutine was done."""


class LoopThread:
    """An event loop that lives on a daemon thread of its own until `close`.

    `run` may be called from any thread but that one, also from several at once and from inside another running loop
    (a notebook), which it blocks.
    """

    def __init__(self, name: str = "widebeam-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._handing_over = threading.RLock()
        """Held while a coroutine is handed to the loop: what comes behind its end would never be done."""
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result or raise its error.

        If the caller is interrupted (Ctrl-C), the coroutine is cancelled. Raises LoopClosed after `close`, and where
        that ends the coroutine.
        """
        with self._handing_over:
            if self._closed or threading.current_thread() is self._thread:
                coro.close()
                if self._closed:
                    raise LoopClosed("this event loop is closed")
                raise RuntimeError("run() would wait for itself")
            future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        try:
            return future.result()
        except CancelledError:
            if self._closed:
                raise LoopClosed("this event loop is closed") from None
            raise
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, stop the loop and join the thread. Closing twice, or on two threads, is fine."""
        with self._handing_over:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
