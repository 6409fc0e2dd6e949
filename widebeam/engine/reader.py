"""The thread that waits for the device: it reads the results of launched waves back and delivers them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

import torch

from widebeam.engine.flight import Flight
from widebeam.engine.job import Job, Outcome
from widebeam.errors import EngineError
from widebeam.faults import counted

log = logging.getLogger(__name__)
Deliver = Callable[[list[Outcome]], None]
"""Takes outcomes; called on the GPU thread and on the reader's, must not block."""


class Step(Enum):
    """How far a wave has come."""

    PREFILLED = auto()
    DONE = auto()


class Progress(NamedTuple):
    """A launched wave, known by its list of jobs, has come so far."""

    jobs: list[Job]
    step: Step
    prefill_s: float | None = None
    """Time of its prefill, of a wave that is done."""


class Reader:
    """A thread that waits for launched waves, in order, and delivers what they gave."""

    def __init__(self, deliver: Deliver, report: Callable[[Progress | Exception], None]) -> None:
        self._deliver, self._report = deliver, report
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="widebeam-reader", daemon=True)
        self._thread.start()

    def add(self, flight: Flight) -> None:
        self._flights.put(flight)

    def close(self) -> None:
        """Block until everything added has been delivered."""
        self._flights.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (flight := self._flights.get()) is not None:
            try:
                flight.launched.wait_for_prefill()
                self._report(Progress(flight.jobs, Step.PREFILLED))
                self._deliver(self._read(flight))
            except Exception as error:  # the device is broken, which it says when it is waited for
                self._report(error)
                return
            self._report(Progress(flight.jobs, Step.DONE, flight.prefill_s))
            del flight  # it would hold its jobs and their catalog until the next one comes

    @staticmethod
    def _read(flight: Flight) -> list[Outcome]:
        """The wave's outcomes; a fault in reading them fails this wave alone."""
        try:
            return flight.outcomes()
        except torch.AcceleratorError:
            raise
        except Exception:
            log.exception("the results of a wave of %s could not be read", counted(len(flight.jobs), "request"))
            return [Outcome(job, EngineError("the search failed; see the server's log")) for job in flight.jobs]
