"""The processes of the ranks that follow, started and watched by the leader."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from widebeam.config import EngineConfig
from widebeam.engine.ranks import Place

log = logging.getLogger(__name__)
END_S = 10.0
"""For a process to end once it may."""


class Errand(msgspec.Struct, frozen=True):
    """What a follower is told at its start: one line of JSON on its stdin."""

    config: EngineConfig
    folder: str
    """The checkpoint's."""
    place: Place


class Line(msgspec.Struct, frozen=True):
    """What a follower has for the log: a line of JSON each on its stdout."""

    logger: str
    level: int
    message: str
    exception: str | None
    """Its traceback."""


class Followers:
    """One process for each rank but the first. They end when this process does, however it ends."""

    def __init__(self, config: EngineConfig, folder: Path, on_end: Callable[[str], None]) -> None:
        """`on_end` is called, on a thread of its own, with the reason, if one of them ends by itself."""
        self._config, self._folder, self._on_end = config, folder, on_end
        self._meeting = Path(tempfile.mkdtemp(prefix="widebeam-"))  # only this user may go there
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watches: list[threading.Thread] = []
        self._expected = {0}
        """Exit statuses of processes that end as they are told to."""

    @property
    def place(self) -> Place:
        """The leader's."""
        return self._place(0)

    def _place(self, rank: int) -> Place:
        return Place(rank, self._config.tensor_parallel_size, str(self._meeting / "ranks"))

    def start(self) -> None:
        """Does not wait until they are ready."""
        for rank in range(1, self._config.tensor_parallel_size):
            process = subprocess.Popen(
                [sys.executable, "-m", "widebeam.engine.follower"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # an interrupt from the terminal is for the leader
                env=os.environ | {"TQDM_DISABLE": "1"},
            )
            self._processes.append(process)
            assert process.stdin is not None
            errand = Errand(self._config, str(self._folder), self._place(rank))
            process.stdin.write(msgspec.json.encode(errand) + b"\n")
            process.stdin.flush()
            watch = threading.Thread(target=self._watch, args=(rank, process), name="widebeam-watch", daemon=True)
            watch.start()
            self._watches.append(watch)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                pass_on(rank, line)
        status = process.wait()
        if status not in self._expected:
            reason = f"rank {rank} of the model has ended with status {status}"
            log.critical("%s: the engine gives up", reason)
            self._on_end(reason)

    def close(self) -> None:
        """End those that are left, and wait for them, and for what the log has to say of them."""
        self._expected.add(os.EX_SOFTWARE)  # of those whose stdin ends
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._expected.add(-signal.SIGKILL)
                process.kill()  # which a broken device may hold up: nobody waits for that
        for watch in self._watches:
            watch.join(1.0)
        shutil.rmtree(self._meeting, ignore_errors=True)


def pass_on(rank: int, line: bytes) -> None:
    """Log a Line of a follower, as everything is logged here."""
    try:
        said = msgspec.json.decode(line, type=Line)
    except msgspec.DecodeError:  # it was killed as it wrote
        said = Line(__name__, logging.WARNING, line.decode(errors="replace"), None)
    logger = logging.getLogger(said.logger)
    if logger.isEnabledFor(said.level):
        record = logger.makeRecord(said.logger, said.level, "", 0, "rank %d: %s", (rank, said.message), None)
        record.exc_text = said.exception
        logger.handle(record)
