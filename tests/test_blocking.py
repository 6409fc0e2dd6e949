"""The event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from widebeam.blocking import LoopClosed, LoopThread


def test_loop_thread_returns_raises_and_closes() -> None:
    thread = LoopThread()

    async def fail() -> None:
        raise KeyError("inner")

    assert thread.run(asyncio.sleep(0, "value")) == "value"
    with pytest.raises(KeyError, match="inner"):
        thread.run(fail())
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        thread.run(asyncio.sleep(0))


def test_loop_thread_refuses_to_wait_for_itself() -> None:
    thread = LoopThread()

    async def inner() -> None:
        thread.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="itself"):
        thread.run(inner())
    thread.close()


def test_closing_a_loop_thread_cancels_what_runs() -> None:
    thread = LoopThread()
    outcome: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            outcome.append("cancelled")
            raise

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        return task

    thread.run(start())
    thread.close()
    assert outcome == ["cancelled"]


def test_what_comes_beside_a_close_ends() -> None:
    """A coroutine is done, cancelled or refused, and nobody waits for ever."""
    for _ in range(50):
        thread = LoopThread()
        outcomes: list[str] = []

        def calls(thread: LoopThread = thread, outcomes: list[str] = outcomes) -> None:
            try:
                while True:
                    thread.run(asyncio.sleep(0))
            except LoopClosed as error:
                outcomes.append(str(error))

        callers = [threading.Thread(target=calls, daemon=True) for _ in range(4)]
        closers = [threading.Thread(target=thread.close, daemon=True) for _ in range(2)]
        for one in (*callers, *closers):
            one.start()
        for one in (*callers, *closers):
            one.join(30)
        assert outcomes == ["this event loop is closed"] * 4
