"""What a chaos run is made of: clients that leave, waves that break, and a ledger of every outcome."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.http.cases import Case
from widebeam.engine.engine import Engine
from widebeam.engine.job import Job, Outcome
from widebeam.engine.request import SearchResult


async def leave(address: tuple[str, int], case: Case, rng: np.random.Generator) -> None:
    """Send all or half of a request, then go, at once or while it waits or runs.

    The server says that it has begun with the request before the body is sent.
    """
    delay, half, reset = float(rng.uniform(0, 0.06)), rng.random() < 0.2, rng.random() < 0.5
    reader, writer = await asyncio.open_connection(*address)
    body = json.dumps(case.named(case.name)).encode()
    writer.write(
        f"POST {case.route} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode()
    )
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body[: len(body) // 2] if half else body)
    await asyncio.sleep(delay)
    if reset:
        writer.transport.abort()
    else:
        writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@dataclass
class Ledger:
    """Every job that the engine accepted, and every outcome that the device's side gave it."""

    jobs: list[Job] = field(default_factory=list)
    outcomes: Counter[Job] = field(default_factory=Counter)
    results: dict[str, SearchResult] = field(default_factory=dict)

    @contextmanager
    def kept(self, engine: Engine) -> Iterator[Ledger]:
        """Write down what passes between the engine and its worker."""
        submit, resolve = engine._worker.submit, engine._waiting.resolve

        def submitted(job: Job) -> None:
            self.jobs.append(job)
            submit(job)

        def resolved(outcomes: list[Outcome]) -> None:
            for outcome in outcomes:
                self.outcomes[outcome.job] += 1
                if isinstance(outcome.result, SearchResult):
                    self.results[outcome.result.request_id] = outcome.result
            resolve(outcomes)

        engine._worker.submit, engine._waiting.resolve = submitted, resolved  # type: ignore[method-assign]
        try:
            yield self
        finally:
            engine._worker.submit, engine._waiting.resolve = submit, resolve  # type: ignore[method-assign]

    @property
    def settled(self) -> bool:
        return all(self.outcomes[job] for job in self.jobs)


KINDS = ("memory", "network", "reading")
LAYERS = (1, 6, 31)
"""Calls of layers until a wave breaks: in the prompts, at an early level, and at a later one."""


@dataclass
class Faults:
    """Breaks a wave after every `every` that ran: by want of memory, by an error in the network, or by unreadable
    results, whichever has broken the fewest so far. A wave that ends before it breaks leaves that to the next one."""

    every: int
    out_of_memory: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """Ids of the searches that were in such waves."""
    waves: Counter[str] = field(default_factory=Counter)
    """Those that broke, by kind."""
    _whole: int = 0
    """Waves since the last one that broke."""
    _layers_left: int = 0
    """Until the network raises; 0: it does not."""
    _error: Exception = field(default_factory=Exception)

    @property
    def of_each_kind(self) -> bool:
        return all(self.waves[kind] for kind in KINDS)

    @contextmanager
    def injected(self, engine: Engine) -> Iterator[Faults]:
        """The network and the launch are the real ones; only what they raise is not."""
        runtime: Any = engine._runtime
        launch = runtime.launch

        def before_a_layer(*_: Any) -> None:
            if self._layers_left:
                self._layers_left -= 1
                if not self._layers_left:
                    raise self._error

        def maybe_broken(*args: Any) -> Any:
            outer = self._layers_left, self._error  # a wave may be launched in the middle of another
            try:
                return self._launch(launch, *args)
            finally:
                self._layers_left, self._error = outer

        hook = runtime.core.model.layers.register_forward_pre_hook(before_a_layer)
        runtime.launch = maybe_broken
        try:
            yield self
        finally:
            hook.remove()
            runtime.launch = launch

    def _launch(self, launch: Callable[..., Any], jobs: list[Job], *rest: Any) -> Any:
        self._layers_left = 0
        kind = min(KINDS, key=lambda kind: self.waves[kind]) if self._whole >= self.every else ""
        ids = {job.search.request_id for job in jobs}
        if kind in ("memory", "network"):
            self._error = torch.OutOfMemoryError("no memory left") if kind == "memory" else ValueError("broken")
            self._layers_left = LAYERS[self.waves[kind] % len(LAYERS)]
        try:
            flight = launch(jobs, *rest)
        except Exception as error:
            if error is self._error:
                self._broke(kind, ids)
            raise
        if kind == "reading":
            flight.launched.result = _unreadable
            self._broke(kind, ids)
        else:
            self._whole += 1
        return flight

    def _broke(self, kind: str, ids: set[str]) -> None:
        self._whole = 0
        self.waves[kind] += 1
        (self.out_of_memory if kind == "memory" else self.failed).update(ids)


def _unreadable() -> Any:
    raise ValueError("these results cannot be read")


@asynccontextmanager
async def meanwhile(*works: Callable[[], Any]) -> AsyncIterator[None]:
    """Repeat each of these until the block ends, with short pauses; a failure of theirs fails the block."""
    over = asyncio.Event()

    async def repeat(work: Callable[[], Any]) -> None:
        while not over.is_set():
            await work()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.03)

    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(repeat(work))
        try:
            yield
        finally:
            over.set()
