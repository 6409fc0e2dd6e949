"""The GPU thread: the only code that starts device work once the engine runs.

It takes jobs from an inbox, lets the scheduler cut waves, runs them, and hands outcomes back a wave at a time. Whatever
happens on it, every job that it was given gets an outcome.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from widebeam.engine.runtime import Runtime
from widebeam.engine.scheduler import Job, Outcome, Scheduler
from widebeam.errors import EngineDead, EngineError, OutOfMemory, RequestError, StartupError

log = logging.getLogger(__name__)
Deliver = Callable[[list[Outcome]], None]
"""Takes the outcomes of a wave; called on the GPU thread, must not block."""


@dataclass
class Call:
    """A function to run on the GPU thread between waves."""

    function: Callable[[Runtime], Any]
    future: Future[Any]

    def run(self, runtime: Runtime) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function(runtime))
        except Exception as error:
            self.future.set_exception(error)

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Worker:
    """A thread that owns a Runtime."""

    def __init__(self, build: Callable[[], Runtime], deliver: Deliver, died: Callable[[], None]) -> None:
        self._build = build
        self._deliver = deliver
        self._died = died
        self._inbox: queue.SimpleQueue[Job | Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="widebeam-gpu", daemon=True)
        self.ready: Future[Runtime] = Future()
        """Set when the model is loaded, or holds the error that stopped it."""
        self._end: RequestError | None = None
        self._running: list[Job] = []
        self._stopping = threading.Event()
        self.waves = 0
        self.out_of_memory = 0

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Its outcome comes through `deliver`."""
        self._inbox.put(job)
        self._answer_if_ended()

    def call(self, function: Callable[[Runtime], Any]) -> Future[Any]:
        """Run a function on the GPU thread, between waves."""
        future: Future[Any] = Future()
        self._inbox.put(Call(function, future))
        self._answer_if_ended()
        return future

    def stop(self) -> None:
        """Tell the thread to end: what waits fails, what runs fails at its next piece. Does not block."""
        self._stopping.set()
        self._inbox.put(None)

    def join(self) -> None:
        """Block until the thread has ended."""
        if self._thread.is_alive():
            self._thread.join()

    def _main(self) -> None:
        ready = Call(lambda runtime: runtime, self.ready)
        try:
            runtime = self._build()
        except Exception as error:
            if not isinstance(error, StartupError):
                log.exception("the engine could not start")
            ready.fail(error)
            return
        scheduler = Scheduler(runtime.limits, lambda outcome: self._deliver([outcome]))
        ready.run(runtime)
        try:
            self._loop(runtime, scheduler)
        except BaseException:
            log.exception("the GPU thread died")
            self._end = EngineDead("the GPU thread died")
            self._died()
        else:
            self._end = EngineDead("the engine has stopped")
        if jobs := self._running + scheduler.clear():
            self._deliver([Outcome(job, self._end) for job in jobs])
        self._answer_if_ended()

    def _loop(self, runtime: Runtime, scheduler: Scheduler) -> None:
        """Waves until told to stop. Waits on the inbox only when there is nothing to run."""
        while True:
            while not (len(scheduler) and self._inbox.empty()):
                message = self._inbox.get()
                if message is None:
                    return
                if isinstance(message, Job):
                    scheduler.add(message)
                else:
                    message.run(runtime)
            self._running = scheduler.next_wave(time.monotonic())
            if self._running:
                outcomes = self._run(runtime, self._running)
                self._running = []
                self._deliver(outcomes)

    def _run(self, runtime: Runtime, jobs: list[Job]) -> list[Outcome]:
        """One wave. Running out of memory fails the wave alone; a broken device ends the thread."""
        self.waves += 1
        try:
            return runtime.run(jobs, self._stopping.is_set)
        except torch.OutOfMemoryError:
            self.out_of_memory += 1
            log.error("a wave of %d requests ran out of memory", len(jobs))
            torch.cuda.empty_cache()
            failure: RequestError = OutOfMemory("the GPU ran out of memory", retry_after_s=1.0)
        except torch.AcceleratorError:
            raise
        except Exception:
            log.exception("a wave of %d requests failed", len(jobs))
            failure = EngineError("the search failed; see the server's log")
        return [Outcome(job, failure) for job in jobs]

    def _answer_if_ended(self) -> None:
        """Fail what lies in the inbox of an ended thread. Both sides call it, so that nothing is left between them."""
        while self._end is not None:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, Job):
                self._deliver([Outcome(message, self._end)])
            elif message is not None:
                message.fail(self._end)
