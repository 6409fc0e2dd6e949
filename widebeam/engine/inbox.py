"""What is sent to the GPU thread, and what becomes of it if that has ended. Nothing that is sent stays unanswered."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from widebeam.engine.core import FATAL
from widebeam.engine.job import Job, Outcome
from widebeam.engine.reader import Deliver, Progress
from widebeam.engine.runtime import Runtime
from widebeam.errors import RequestError


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
            if isinstance(error, FATAL):
                raise

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


Message = Job | Call | Progress | Exception | None
"""What the GPU thread may find in its inbox; None ends it."""


class Inbox:
    """Messages in turn. Put on any thread, read on the GPU thread."""

    def __init__(self, deliver: Deliver, note: Callable[[Progress], None]) -> None:
        """`note` gets progress that comes after the end."""
        self._deliver, self._note = deliver, note
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._later: deque[Message] = deque()
        """What came in the middle of a long wave and is done between waves. The GPU thread's."""
        self._end: RequestError | None = None

    def put(self, message: Message) -> None:
        """Leave it for the GPU thread."""
        self._queue.put(message)

    def send(self, message: Job | Call) -> None:
        """Have it done or, after the end, answered at once."""
        self._queue.put(message)
        self._answer_if_ended()

    @property
    def empty(self) -> bool:
        return not self._later and self._queue.empty()

    def get(self, timeout: float | None = None) -> Message:
        """The next message, also of those that were left. Raises queue.Empty after so many seconds without any."""
        return self._later.popleft() if self._later else self._queue.get(timeout=timeout)

    def take_in(self) -> Iterator[Job | Progress]:
        """The jobs and the progress that have come, without waiting; what is done between waves alone is left for
        then."""
        while not self._queue.empty():
            message = self._queue.get()
            if isinstance(message, Job | Progress):
                yield message
            else:
                self._later.append(message)

    def end(self, error: RequestError) -> None:
        """From now on whatever comes is answered with this error. On any thread."""
        self._end = error
        self._answer_if_ended()

    def close(self, error: RequestError) -> None:
        """The same when the GPU thread ends, on which this is called: also what it has left for later."""
        for message in self._later:
            self._queue.put(message)
        self.end(error)

    def _answer_if_ended(self) -> None:
        """Both sides call it, so that nothing is left between them."""
        while self._end is not None:
            try:
                message = self._queue.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, Job):
                self._deliver([Outcome(message, self._end)])
            elif isinstance(message, Call):
                message.fail(self._end)
            elif isinstance(message, Progress):
                self._note(message)
