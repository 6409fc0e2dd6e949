"""A hang is noticed, everybody is answered, and nothing waits for what will not come back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from widebeam.engine import watchdog as module
from widebeam.engine.engine import Engine
from widebeam.engine.request import SearchParams
from widebeam.engine.watchdog import LAUNCH_FACTOR, Busy, Watchdog
from widebeam.errors import EngineDead

LIMIT_S = 0.2


def hang_of(busy: Any) -> bool:
    """Whether a watchdog over `busy` sees a hang within five times its limit."""
    seen = threading.Event()
    watchdog = Watchdog(busy, LIMIT_S, seen.set)
    watchdog.start()
    hangs = seen.wait(5 * LIMIT_S)
    watchdog.stop()
    return hangs


def test_what_counts_as_a_hang() -> None:
    start = time.monotonic()
    busy: dict[str, Callable[[], Busy | None]] = {
        "a wave that is not read": lambda: Busy(start, launching=False),
        "nothing": lambda: None,
        "it moves": lambda: Busy(time.monotonic(), launching=False),
        "a launch, which may compile": lambda: Busy(start, launching=True),
        "a launch for ever": lambda: Busy(start - LAUNCH_FACTOR * LIMIT_S, launching=True),
    }
    with ThreadPoolExecutor(len(busy)) as pool:
        hangs = dict(zip(busy, pool.map(hang_of, busy.values()), strict=True))
    assert {what for what, hang in hangs.items() if hang} == {"a wave that is not read", "a launch for ever"}


async def test_a_launch_that_hangs_answers_everybody(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAUNCH_FACTOR", 1)
    release = threading.Event()
    async with Engine(str(checkpoint), device="cpu", hang_timeout_s=LIMIT_S) as engine:
        monkeypatch.setattr(engine._runtime, "launch", lambda *_: release.wait(60))
        searches = [engine.submit([5, 6], SearchParams(beam_width=4)) for _ in range(5)]
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*searches, return_exceptions=True)
            assert all(isinstance(outcome, EngineDead) for outcome in outcomes)
            await engine.died.wait()
        assert engine.state == "dead"
        with pytest.raises(EngineDead):
            await engine.submit([5], SearchParams(beam_width=4))
    release.set()


async def test_a_device_that_hangs_answers_everybody(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    async with Engine(str(checkpoint), device="cpu", hang_timeout_s=LIMIT_S) as engine:
        launch = engine._runtime.launch

        def hanging(*args: Any) -> Any:
            flight = launch(*args)
            monkeypatch.setattr(flight.launched, "wait_for_prefill", lambda: release.wait(60))
            return flight

        monkeypatch.setattr(engine._runtime, "launch", hanging)
        searches = [engine.submit([5, 6], SearchParams(beam_width=4)) for _ in range(5)]
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*searches, return_exceptions=True)
        assert all(isinstance(outcome, EngineDead) for outcome in outcomes)
    release.set()
