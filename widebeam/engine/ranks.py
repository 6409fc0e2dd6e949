"""Several processes, one for each GPU, that run one model together: how they meet, and how the first tells the others
what to do. The first is the leader, the others follow.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from widebeam.config import EngineConfig
from widebeam.engine.messages import Frame, Message
from widebeam.engine.watchdog import LAUNCH_FACTOR
from widebeam.errors import ConfigError, StartupError
from widebeam.model.parallel import Shard

INLINE = 8192
"""Bytes of a frame that go with its length: most have no more."""
LENGTH = 8
IDLE = datetime.timedelta(days=365)
"""A follower waits for messages for as long as nobody asks; that the leader has ended it learns at once."""


class Place(msgspec.Struct, frozen=True):
    """Which of the ranks a process is, and where they meet."""

    rank: int
    size: int
    store: str | None
    """A file that all of them can write; None: as torchrun has set the environment."""

    @property
    def spawns(self) -> bool:
        """The leader starts the others itself."""
        return self.store is not None


def torchrun_place(config: EngineConfig, environment: Mapping[str, str] = os.environ) -> Place | None:
    """Of this process if torchrun started it and the model is divided. Raises ConfigError."""
    if config.tensor_parallel_size == 1 or not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return None
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if size != config.tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size}, but torchrun started {size} processes (WORLD_SIZE)"
        )
    return Place(rank, size, None)


class Channel:
    """Messages from the leader to all others, in order. For one thread at a time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(Frame)

    def send(self, message: Message, arrays: Sequence[np.ndarray] = ()) -> None:
        """A message and arrays of the types of `messages.DType`. Returns when all have taken them."""
        frame = Frame(message, [(array.dtype.str, array.size) for array in arrays])  # type: ignore[misc]
        data = msgspec.msgpack.encode(frame)
        head = bytearray(LENGTH + INLINE)
        head[:LENGTH] = len(data).to_bytes(LENGTH, "little")
        head[LENGTH : LENGTH + len(data)] = data[:INLINE]
        with self._lock:
            self._broadcast(np.frombuffer(head[: LENGTH + INLINE], np.uint8))
            self._broadcast(np.frombuffer(bytearray(data[INLINE:]), np.uint8))
            for array in arrays:
                self._broadcast(array if array.flags.writeable else array.copy())

    def receive(self) -> tuple[Message, list[np.ndarray]]:
        """What the leader sends next."""
        head = np.empty(LENGTH + INLINE, np.uint8)
        self._broadcast(head)
        length = int.from_bytes(head[:LENGTH].tobytes(), "little")
        rest = np.empty(max(0, length - INLINE), np.uint8)
        self._broadcast(rest)
        frame = self._decoder.decode(head[LENGTH : LENGTH + min(length, INLINE)].tobytes() + rest.tobytes())
        arrays = [np.empty(size, dtype) for dtype, size in frame.arrays]
        for array in arrays:
            self._broadcast(array)
        return frame.message, arrays

    def meet(self) -> None:
        """Return when all have come here."""
        with self._lock:
            dist.barrier(self._group)

    def _broadcast(self, array: np.ndarray) -> None:
        if array.size:
            dist.broadcast(torch.from_numpy(array.reshape(-1).view(np.uint8)), 0, self._group)


class Ranks:
    """The process groups of one rank. All ranks make it together."""

    def __init__(self, place: Place, config: EngineConfig, cuda: bool) -> None:
        """Waits for all. Raises StartupError."""
        if dist.is_initialized():
            raise ConfigError("--tensor-parallel-size: this process has another engine of several ranks")
        timeout = datetime.timedelta(seconds=LAUNCH_FACTOR * config.hang_timeout_s)
        if place.spawns and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside can connect
        store = None if place.store is None else dist.FileStore(place.store, place.size)
        try:
            dist.init_process_group(
                "nccl" if cuda else "gloo", store=store, rank=place.rank, world_size=place.size, timeout=timeout
            )
        except (RuntimeError, ValueError) as error:  # a port that is taken, a variable that is not set, nobody there
            raise ConfigError(f"--tensor-parallel-size: the ranks do not meet: {str(error).splitlines()[0]}") from error
        assert dist.group.WORLD is not None
        self.shard = Shard(place.rank, place.size, dist.group.WORLD.group_name)
        self.commands = Channel(dist.new_group(backend="gloo", timeout=IDLE))
        """For the thread that launches waves."""
        self.bulk = Channel(dist.new_group(backend="gloo", timeout=IDLE))
        """For what is long, beside the waves."""
        self._checks = dist.new_group(backend="gloo", timeout=timeout)

    def agree(self, chosen: Mapping[str, object]) -> None:
        """Raise ConfigError, on all ranks, if they do not have the same; StartupError if one of them has ended."""
        words = [hashlib.blake2b(repr(value).encode(), digest_size=8).digest() for value in chosen.values()]
        mine = torch.from_numpy(np.frombuffer(bytearray(b"".join(words)), np.int64))
        all_of_them = [torch.empty_like(mine) for _ in range(self.shard.size)]
        try:
            dist.all_gather(all_of_them, mine, self._checks)
        except RuntimeError as error:
            raise StartupError("another rank of the model has ended while it started; it says why") from error
        for place, name in enumerate(chosen):
            if any(theirs[place] != all_of_them[0][place] for theirs in all_of_them):
                raise ConfigError(f"--tensor-parallel-size: the ranks differ in {name}")

    def leave(self) -> None:
        """Give the process groups up, so that others may be made.

        Not those of NCCL, which would wait until no CUDA graph holds its communicators: they go with the process.
        """
        if dist.get_backend() == "gloo":
            dist.destroy_process_group()
