"""Notices when the GPU thread or the device has stopped answering: a hang raises nothing by itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

log = logging.getLogger(__name__)
LAUNCH_FACTOR = 10
"""A launch may compile a shape that warm-up did not meet, so it gets so many times the limit."""


class Busy(NamedTuple):
    """What has been going on longest."""

    since: float
    """Monotonic seconds."""
    launching: bool
    """The host is launching a wave; otherwise it waits for the device."""


class Activity:
    """What a GPU thread does, and since when. Written by it and by the thread that waits for the device; a watchdog
    looks at it from its own."""

    def __init__(self) -> None:
        self._progress_at = 0.0
        self._launching = False

    def progressed(self) -> None:
        """Something has just ended."""
        self._progress_at = time.monotonic()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """The host is at work for the device, which may take long but not for ever."""
        before = self._launching  # a wave may be launched in the middle of another
        self._progress_at, self._launching = time.monotonic(), True
        try:
            yield
        finally:
            self._progress_at, self._launching = time.monotonic(), before

    def busy(self, waves: bool) -> Busy | None:
        """None if nothing goes on; `waves`: whether there are any on the device."""
        return Busy(self._progress_at, self._launching) if self._launching or waves else None


class Watchdog:
    """A thread that looks at `busy` now and then, and calls `on_hang` once if it has been the same for too long."""

    def __init__(self, busy: Callable[[], Busy | None], limit_s: float, on_hang: Callable[[], None]) -> None:
        self._busy, self._limit_s, self._on_hang = busy, limit_s, on_hang
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._main, name="widebeam-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Does not block."""
        self._stopped.set()

    def _main(self) -> None:
        while not self._stopped.wait(min(1.0, self._limit_s / 4)):
            busy = self._busy()
            if busy is None:
                continue
            waited = time.monotonic() - busy.since
            if waited > self._limit_s * (LAUNCH_FACTOR if busy.launching else 1):
                doing = "a launch" if busy.launching else "the device"
                log.critical("%s has not answered for %.0f s: the engine gives up", doing, waited)
                self._on_hang()
                return
