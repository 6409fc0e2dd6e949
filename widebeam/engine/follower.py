"""A rank that follows: it runs what the leader runs, on its own part of the model, and reads nothing back.

`python -m widebeam.engine.follower` is how a leader starts it: one line of JSON comes on stdin, which then stays open
for as long as the leader lives. Its log goes to the leader, through stdout.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

import msgspec
import numpy as np

from widebeam.config import EngineConfig
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.index import CatalogIndex
from widebeam.engine.compile import captured_at_once
from widebeam.engine.messages import Answer, Launch, Message, Nodes, Reserve, Stop, wave_of
from widebeam.engine.ranks import Place, Ranks
from widebeam.engine.runtime import Runtime
from widebeam.engine.search import Between, launch_wave
from widebeam.engine.spawn import Errand, Line
from widebeam.engine.startup import choose_device, longest_context
from widebeam.errors import StartupError
from widebeam.model.config import load_model_config
from widebeam.model.weights import resolve_checkpoint
from widebeam.ranges import RangeLease

log = logging.getLogger("widebeam.engine.follower")  # also where it is __main__


@dataclass(eq=False)
class CatalogCopy:
    """What waves need of a catalog version; its items stay with the leader."""

    name: str
    level_token_ids: list[np.ndarray]
    index: CatalogIndex = field(init=False, repr=False)

    @property
    def depth(self) -> int:
        return len(self.level_token_ids)

    @property
    def num_items(self) -> int:
        return self.index.num_items


class Follower:
    """Does what the leader tells."""

    def __init__(self, runtime: Runtime, ranks: Ranks) -> None:
        self._runtime, self._core, self._ranks = runtime, runtime.core, ranks
        self._catalogs: dict[int, Future[CatalogCopy]] = {}
        """By number, from when either thread hears of it."""
        self._lock = threading.Lock()

    def run(self) -> None:
        """Until the leader stops it. Raises whatever goes wrong: then it is out of step."""
        threading.Thread(target=self._fill, name="widebeam-fill", daemon=True).start()
        between = Between(self._ask, self._ask, self._run_others)
        while not isinstance(message := self._next(), Stop):
            self._launch(message, between)

    def _next(self) -> Launch | Answer | Stop:
        """The next message about waves."""
        while True:
            message, arrays = self._ranks.commands.receive()
            if isinstance(message, Reserve):
                self._reserve(message, arrays)
            else:
                return cast("Launch | Answer | Stop", message)

    def _ask(self) -> bool:
        """What the leader decides."""
        message = self._next()
        if not isinstance(message, Answer):
            raise RuntimeError(f"{type(message).__name__} in the middle of a wave")
        return message.yes

    def _run_others(self) -> None:
        while isinstance(message := self._next(), Launch):
            self._launch(message, Between(self._ask, self._ask, self._run_others))

    def _launch(self, message: Message, between: Between) -> None:
        if not isinstance(message, Launch):
            raise RuntimeError(f"{type(message).__name__} between waves")
        core = self._core
        if message.graphed is not None and message.graphed != sorted(core.programs.graphed):
            core.programs.graphed.clear()
            core.programs.graphed.update(message.graphed)
        catalog = None if message.catalog is None else cast(Catalog, self._copy(message.catalog).result())
        wave = wave_of(message, catalog, self._runtime.config.max_wave_rows)
        trie = None if catalog is None else core.catalogs.trie(catalog)
        with captured_at_once() if message.at_once else nullcontext():
            launch_wave(core, wave, trie, between)

    def _copy(self, number: int) -> Future[CatalogCopy]:
        with self._lock:
            return self._catalogs.setdefault(number, Future())

    def _reserve(self, message: Reserve, codebooks: list[np.ndarray]) -> None:
        with self._lock:
            for number in self._catalogs.keys() - {*message.living, message.number}:
                del self._catalogs[number]
        copy = CatalogCopy(message.name, codebooks)
        self._core.catalogs.place(cast(Catalog, copy), RangeLease(*message.range))
        self._copy(message.number).set_result(copy)

    def _fill(self) -> None:
        """A thread: put the nodes of catalogs on the device while waves run."""
        try:
            while True:
                message, arrays = self._ranks.bulk.receive()
                assert isinstance(message, Nodes)
                copy = self._copy(message.number).result()
                copy.index = CatalogIndex.of_arrays(arrays, message.mixed_depth)
                self._core.catalogs.upload(cast(Catalog, copy))
                self._ranks.bulk.meet()
        except BaseException:
            log.exception("a catalog could not be taken over")
            os._exit(os.EX_SOFTWARE)


def follow(errand: Errand) -> int:
    """Be a follower until the leader stops; returns the exit status: 0, or that of an error."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the leader, which still answers who waits
    config, place = errand.config, errand.place
    try:
        model_config = load_model_config(Path(errand.folder))
        longest = longest_context(config, model_config)
        cuda = choose_device(config.device, place.rank).type == "cuda"
        ranks = Ranks(place, config, cuda)
        runtime = Runtime(config, Path(errand.folder), model_config, longest, ranks)
        Follower(runtime, ranks).run()
    except StartupError as error:
        log.error("%s", error)
        return 2
    except Exception:
        log.exception("this rank is out of step, and ends")
        return os.EX_SOFTWARE
    return 0


def follow_torchrun(config: EngineConfig, place: Place) -> NoReturn:
    """`follow` for a process that torchrun started. Raises StartupError if there is no such checkpoint."""
    _end(follow(Errand(config, str(resolve_checkpoint(config.model, config.revision)), place)))


def _end(status: int) -> NoReturn:
    """At once: NCCL, or a broken device, may hold up the interpreter's own end for ever."""
    logging.shutdown()
    os._exit(status)


def _end_with_the_leader() -> None:
    """A thread: nothing comes on stdin but its end."""
    sys.stdin.buffer.read()
    os._exit(os.EX_SOFTWARE)


class ToLeader(logging.Handler):
    """Sends records to a leader that logs them."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            exception = logging.Formatter().formatException(record.exc_info) if record.exc_info else None
            line = Line(record.name, record.levelno, record.getMessage(), exception)
            self._stream.write(msgspec.json.encode(line) + b"\n")
        except Exception:  # the leader has ended, or a text cannot be encoded
            self.handleError(record)


def main() -> None:
    """Follow the process that started this one."""
    lines = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no line for the leader
    logging.basicConfig(level=logging.WARNING, handlers=[ToLeader(lines)])
    logging.captureWarnings(True)
    errand = msgspec.json.decode(sys.stdin.buffer.readline(), type=Errand)
    threading.Thread(target=_end_with_the_leader, daemon=True).start()
    _end(follow(errand))


if __name__ == "__main__":
    main()
