"""The GPU thread: the only code that starts device work once the engine runs.

It takes jobs from an inbox, lets the scheduler cut waves and launches them; another thread waits for the device, reads
results back and delivers them a wave at a time. The next wave is cut when the last one has left its prefill: as late as
keeps the device busy, so that as many as possible go together. Whatever happens, every job gets an outcome.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from widebeam.engine.core import FATAL
from widebeam.engine.growth import Growth
from widebeam.engine.inbox import Call, Inbox, Message
from widebeam.engine.job import LEVEL_RUNGS, Job, Outcome
from widebeam.engine.reader import Deliver, Progress, Reader, Step
from widebeam.engine.runtime import Runtime
from widebeam.engine.scheduler import Load, Scheduler
from widebeam.engine.search import Between
from widebeam.engine.watchdog import Activity, Busy
from widebeam.errors import EngineDead, EngineError, OutOfMemory, RequestError, StartupError
from widebeam.faults import counted

log = logging.getLogger(__name__)
DEPTH = 2
"""Waves that are on the device at once: one runs, and one behind it keeps the device busy while results are read."""
TURN_S = 0.0001
"""How long one thread may keep Python to itself while another wants it. A search passes through three threads, and an
update of a catalog lets others in thousands of times, and what launches kernels asks for Python after each of them: at
Python's own 5 ms each of these times may cost that."""
IDLE_S = 0.5
"""Without a request for so long, none is likely in the next half second."""
COPYING_S = 0.005
"""Between two looks whether copies of pages are over."""
PASSING = 4
"""Short waves that may pass a long one between two of its pieces: the long one goes on, however many wait."""


class Worker:
    """A thread that owns a Runtime."""

    def __init__(self, build: Callable[[], Runtime], deliver: Deliver, died: Callable[[], None]) -> None:
        self._build = build
        self._deliver = deliver
        self._died = died
        self._inbox = Inbox(deliver, self._note)
        self._thread = threading.Thread(target=self._main, name="widebeam-gpu", daemon=True)
        self.ready: Future[Runtime] = Future()
        """Set when the model is loaded, or holds the error that stopped it."""
        self._flying: deque[list[Job]] = deque()
        """Jobs of the waves that were launched and not delivered, oldest first."""
        self._prefilling = 0
        """How many of those waves have not left their prefill."""
        self._cut: list[Job] = []
        """Jobs of the wave that passes a long one next: no longer queued, and not launched."""
        self._stopping = threading.Event()
        self._activity = Activity()
        self._hangs = False
        self._dumped = threading.Lock()
        """Held for good once the stacks have been written."""
        self.scheduler: Scheduler
        """From when the worker is ready."""
        self.out_of_memory = 0

    def start(self) -> None:
        """From then on threads take shorter turns of Python, in the whole process."""
        if sys.getswitchinterval() > TURN_S:
            sys.setswitchinterval(TURN_S)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Its outcome comes through `deliver`."""
        self._inbox.send(job)

    def call(self, function: Callable[[Runtime], Any]) -> Future[Any]:
        """Run a function on the GPU thread, between waves."""
        future: Future[Any] = Future()
        self._inbox.send(Call(function, future))
        return future

    @property
    def busy(self) -> Busy | None:
        """What goes on, for a watchdog to look at from its own thread."""
        return self._activity.busy(bool(self._flying))

    @property
    def on_device(self) -> list[Load]:
        """What each wave takes that was launched and not delivered, oldest first. May be read on any thread."""
        return [self.scheduler.load(jobs) for jobs in tuple(self._flying)]

    def give_up(self, reason: str = "the GPU does not answer") -> None:
        """The thread or the device hangs, for good: whatever is sent from now on is answered at once."""
        self._hangs = True
        self._die()
        self._inbox.end(EngineDead(reason))

    def stop(self) -> None:
        """Tell the thread to end: what waits fails, what runs fails at its next piece. Does not block."""
        self._stopping.set()
        self._inbox.put(None)

    def join(self) -> None:
        """Block until the thread has ended; one that hangs is left alone."""
        while self._thread.is_alive() and not self._hangs:
            self._thread.join(1.0)

    def _main(self) -> None:
        ready = Call(lambda runtime: runtime, self.ready)
        try:
            runtime = self._build()
        except Exception as error:
            if not isinstance(error, StartupError):
                log.exception("the engine could not start")
            ready.fail(error)
            return
        self.scheduler = Scheduler(runtime.limits, lambda outcome: self._deliver([outcome]), runtime.prefixes.look_up)
        reader = Reader(self._deliver, self._on_progress)
        ready.run(runtime)
        try:
            self._loop(runtime, self.scheduler, reader)
            reader.close()
            runtime.prefixes.settle()
            with self._activity.launching():  # other ranks may hang
                runtime.close()
            end = EngineDead("the engine has stopped")
        except BaseException:
            log.exception("the GPU thread died")
            end = EngineDead("the GPU thread died")
            self._die()
            with contextlib.suppress(RuntimeError):  # a broken device copies no pages any more
                runtime.prefixes.settle()
        self._inbox.close(end)
        left = [job for jobs in self._flying for job in jobs] + self._cut + self.scheduler.clear()
        if left:
            self._deliver([Outcome(job, end) for job in left])

    def _die(self) -> None:
        """Nothing is searched any more: say once what every thread does, whatever fails behind. On any thread."""
        started = hasattr(self, "scheduler")  # a start that fails says why at its end
        if started and self._dumped.acquire(blocking=False):
            log.critical("stacks of all threads follow")
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed; who waits is answered all the same
                faulthandler.dump_traceback(sys.__stderr__ or 2)
        self._died()

    def _on_progress(self, progress: Progress | Exception) -> None:
        """Called on the reader's thread."""
        self._activity.progressed()
        self._inbox.put(progress)

    def _note(self, progress: Progress) -> None:
        if progress.step is Step.PREFILLED:
            self._prefilling -= 1
        else:
            self._flying = deque(jobs for jobs in self._flying if jobs is not progress.jobs)

    def _loop(self, runtime: Runtime, scheduler: Scheduler, reader: Reader) -> None:
        """Waves until told to stop. Waits on the inbox only while nothing may be launched."""
        while True:
            since = None  # when jobs began to wait for company, while no wave may be launched
            while not (len(scheduler) and self._has_room and self._inbox.empty):
                if since is None and len(scheduler) and not self._has_room:
                    since = time.monotonic()
                message = self._next_message(runtime)
                if message is None:
                    return
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, Call):
                    with self._activity.launching():
                        message.run(runtime)
                else:
                    self._take(runtime, message)
                del message  # it would hold what it is of, a catalog too, until the next one comes
            now = time.monotonic()
            jobs = scheduler.next_wave(now)
            if jobs and since is not None:
                scheduler.distributions.company_wait_seconds.add(now - since)
            while jobs:
                self._launch(runtime, jobs, reader)
                jobs, self._cut = self._cut, []  # what was to pass a long wave that failed before

    def _next_message(self, runtime: Runtime) -> Message:
        """Wait for the inbox. Meanwhile pages are copied, and once nothing has gone on for IDLE_S, what is left to
        capture is captured."""
        while runtime.prefixes.moves_pages:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=COPYING_S)
            runtime.prefixes.move_pages(self.scheduler.waiting)
        while not (self._flying or len(self.scheduler)):
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=IDLE_S)
            with self._activity.launching():
                if not runtime.capture_more():
                    break
        return self._inbox.get()

    @property
    def _has_room(self) -> bool:
        """Whether another wave may be launched."""
        return not self._prefilling and len(self._flying) < DEPTH

    def _launch(self, runtime: Runtime, jobs: list[Job], reader: Reader) -> None:
        """Start one wave. Running out of memory fails the wave alone; a broken device ends the thread."""
        try:
            with self._activity.launching():  # first: with a wave, a watchdog must never see the time of the last one
                self._flying.append(jobs)
                started = time.perf_counter()
                flight = runtime.launch(jobs, self._stopping.is_set, self._between(runtime, jobs, reader))
                host_s = time.perf_counter() - started
        except torch.OutOfMemoryError:
            self.out_of_memory += 1
            self.scheduler.ran_out_of_memory(jobs)
            log.error(
                "a wave of %s ran out of memory; the next ones have at most %d rows",
                counted(len(jobs), "request"), self.scheduler.rows_limit,
            )  # fmt: skip
            torch.cuda.empty_cache()
            self._fail(jobs, OutOfMemory("the GPU ran out of memory", retry_after_s=1.0))
        except FATAL:
            raise
        except Exception:
            log.exception("a wave of %s failed", counted(len(jobs), "request"))
            self._fail(jobs, EngineError("the search failed; see the server's log"))
        else:
            if jobs[0].levels == LEVEL_RUNGS[0]:  # longer ones wait for the device, and for others, between pieces
                self.scheduler.distributions.wave_host_seconds.add(host_s)
            self.scheduler.had_memory()
            self._prefilling += 1
            reader.add(flight)

    def _between(self, runtime: Runtime, jobs: list[Job], reader: Reader) -> Between:
        """What a wave of these jobs does between its pieces: let short ones pass, and say how far its texts are."""
        held, started = self.scheduler.load(jobs), time.monotonic()

        def others_wait() -> bool:
            self._activity.progressed()
            for message in self._inbox.take_in():
                self._take(runtime, message)
            self._cut = self.scheduler.next_wave(time.monotonic(), held)
            return bool(self._cut)

        def run_others() -> None:
            for more in reversed(range(PASSING)):
                passing, self._cut = self._cut, []
                self._launch(runtime, passing, reader)
                if not (more and others_wait()):  # what is cut must be launched
                    return

        def grown(growth: Growth) -> None:
            growth.tell(jobs, started)

        followed = any(job.grown for job in jobs)
        return Between(others_wait=others_wait, run_others=run_others, grown=grown if followed else None)

    def _take(self, runtime: Runtime, message: Job | Progress) -> None:
        if isinstance(message, Job):
            self.scheduler.add(message)
        else:
            self._note(message)
            if message.prefill_s is not None:
                runtime.prefixes.note_prefill(message.jobs, message.prefill_s)
        runtime.prefixes.move_pages(self.scheduler.waiting)

    def _fail(self, jobs: list[Job], failure: RequestError) -> None:
        """Give up a wave that was not launched."""
        self._note(Progress(jobs, Step.DONE))
        self._deliver([Outcome(job, failure) for job in jobs])
