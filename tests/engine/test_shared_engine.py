"""An engine whose calls come from several threads, or that is started more than once."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_lifecycle import LONG, SMALL
from widebeam import Engine, SearchParams
from widebeam.errors import CatalogError, Draining, EngineDead


class Held(Engine):
    """Counts its starts, each of which waits for a gate."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.starts = 0
        self.gate = threading.Event()

    async def start(self) -> None:
        self.starts += 1
        await asyncio.to_thread(self.gate.wait)
        await super().start()


class Callers:
    """Threads that make a call each at once, and what came of it."""

    def __init__(self, *calls: Callable[[], Any]) -> None:
        self.outcomes: list[Any] = [None] * len(calls)
        together = threading.Barrier(len(calls))

        def main(place: int, call: Callable[[], Any]) -> None:
            together.wait()
            try:
                self.outcomes[place] = call()
            except Exception as error:
                self.outcomes[place] = error

        self.threads = [threading.Thread(target=main, args=one, daemon=True) for one in enumerate(calls)]
        for thread in self.threads:
            thread.start()

    def join(self) -> list[Any]:
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads)
        return self.outcomes

    def wait_for(self, function: str) -> None:
        """Until each of them is in a function of this name."""
        deadline = time.monotonic() + 30
        while not all(function in self._functions(thread) for thread in self.threads):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def _functions(self, thread: threading.Thread) -> set[str]:
        frame, names = sys._current_frames().get(thread.ident or 0), set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        return names


@pytest.mark.parametrize(("threads", "prompt"), [(2, [5, 6, 7]), (8, "watched <a_3> next")], ids=["ids", "text"])
def test_threads_may_make_the_first_call_together(checkpoint: Path, threads: int, prompt: Any) -> None:
    engine = Held(str(checkpoint), **SMALL)
    callers = Callers(*[lambda: engine.generate(prompt, n=2, beam_width=2, max_new_tokens=2)] * threads)
    callers.wait_for("_start_once")
    engine.gate.set()
    outcomes = callers.join()
    expected = engine.generate(prompt, n=2, beam_width=2, max_new_tokens=2)
    engine.close()
    assert engine.starts == 1
    assert [[s.token_ids for s in outcome.sequences] for outcome in outcomes] == [
        [s.token_ids for s in expected.sequences]  # type: ignore[union-attr]
    ] * threads


def test_threads_get_the_same_failure_of_a_start_and_may_try_again(
    checkpoint: Path, catalog_file: Path, tmp_path: Path
) -> None:
    late = tmp_path / "late.jsonl"
    engine = Held(str(checkpoint), catalog=str(late), **SMALL)
    callers = Callers(*[lambda: engine.generate([5], n=1)] * 4)
    callers.wait_for("_start_once")
    engine.gate.set()
    outcomes = callers.join()
    assert isinstance(outcomes[0], CatalogError) and all(outcome is outcomes[0] for outcome in outcomes)
    assert engine.starts == 1
    late.write_bytes(catalog_file.read_bytes())
    outcomes = Callers(*[lambda: engine.run(engine.recommend(input_ids=[5], n=1))] * 4).join()
    engine.close()
    assert engine.starts == 2 and all(outcome.items for outcome in outcomes)


def test_closing_beside_calls_ends_them(checkpoint: Path) -> None:
    """Long searches, texts, and calls that come too late; two threads close."""
    engine = Engine(str(checkpoint), **SMALL)
    wanted = {name: getattr(LONG, name) for name in LONG.__struct_fields__}
    engine.generate([5], max_new_tokens=1)

    def calls() -> None:
        while True:
            engine.generate("watched <a_3>", max_new_tokens=1)

    before = engine.stats().waves
    running = Callers(*[lambda: engine.generate([5] * 20, **wanted)] * 2, *[calls] * 4)
    while engine.stats().waves < before + 10:
        assert all(thread.is_alive() for thread in running.threads), running.outcomes
        time.sleep(0.001)
    assert Callers(*[engine.close] * 2).join() == [None, None]
    assert all(isinstance(outcome, Draining | EngineDead) for outcome in running.join()), running.outcomes
    with pytest.raises(EngineDead, match="stopped"):
        engine.generate([5])
    engine.close()


def test_closing_waits_for_a_start(checkpoint: Path) -> None:
    engine = Held(str(checkpoint), **SMALL)
    callers = Callers(lambda: engine.generate([5], max_new_tokens=1))
    callers.wait_for("_start_once")
    closing = Callers(engine.close)
    closing.wait_for("close")
    engine.gate.set()
    assert closing.join() == [None]
    (outcome,) = callers.join()
    assert engine.state == "stopped" and (isinstance(outcome, Draining | EngineDead) or outcome.sequences)


async def test_a_second_start_is_refused_and_harms_nobody(checkpoint: Path) -> None:
    engine = Engine(str(checkpoint), **SMALL)
    first, second = await asyncio.gather(engine.start(), engine.start(), return_exceptions=True)
    assert first is None and isinstance(second, EngineDead) and "is starting: one starts only once" in second.message
    with pytest.raises(EngineDead, match="is ready: one starts only once"):
        async with engine:
            pass
    assert (await engine.submit([5], SearchParams(max_new_tokens=2))).sequences
    await engine.stop()


async def test_an_engine_stopped_while_it_starts_leaves_no_thread(checkpoint: Path) -> None:
    engine = Engine(str(checkpoint), **SMALL)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineDead, match="while it started"):
        await starting
    assert not engine._worker._thread.is_alive()
