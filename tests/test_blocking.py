"""The event loop on a thread of its own."""

from __future__ import annotations

import asyncio

import pytest

from widebeam.blocking import LoopThread


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
