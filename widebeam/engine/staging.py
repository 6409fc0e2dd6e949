"""Copies to the device and back.

A wave has one copy of each kind, however many arrays, and waits for neither. What is larger goes piece by piece beside
the waves.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float64): torch.float64}
PIECE = 2 << 20
"""Elements of a long array that are copied together: 8 MiB, 0.2 ms of an H200's bus."""
ROOM = 16
"""Bytes at a multiple of which each array begins: compiled code copies what does not."""

Layout = list[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and types of arrays that lie one behind the other."""


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays, of DTYPES, as views of one device buffer, filled by one asynchronous copy from pinned memory.

    Little is done array by array, since the host's time counts before the first kernel runs.
    """
    rooms = [-(-array.nbytes // ROOM) * ROOM for array in arrays.values()]
    host = torch.empty(sum(rooms), dtype=torch.uint8, pin_memory=device.type == "cuda")
    view, start = host.numpy(), 0
    for array, room in zip(arrays.values(), rooms, strict=True):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += room
    buffer, start, staged = host.to(device, non_blocking=True), 0, {}
    of_dtype = {dtype: buffer.view(dtype) for dtype in {DTYPES[array.dtype] for array in arrays.values()}}
    for (name, array), room in zip(arrays.items(), rooms, strict=True):
        strides = [math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
        staged[name] = of_dtype[DTYPES[array.dtype]].as_strided(array.shape, strides, start // array.itemsize)
        start += room
    return staged


def send(arrays: Sequence[np.ndarray], place: Tensor) -> None:
    """Copy arrays of the place's type to the device, one behind the other, by one copy from pinned memory."""
    host = torch.empty(sum(array.size for array in arrays), dtype=place.dtype, pin_memory=place.is_cuda)
    np.concatenate(arrays, out=host.numpy())
    place[: len(host)].copy_(host, non_blocking=True)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """A moment behind all that this thread's stream was given so far. None: a CPU has done it all."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
    event.record()
    return event


class Upload:
    """Long arrays on their way to the device while waves run, on a stream of their own.

    They go through two small pinned buffers by turns, so that a wave's own copies never wait for more than a piece, and
    so that the host converts a piece while the device takes the one before. The GPU thread has no part in it.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._rooms = [torch.empty(PIECE, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        """Behind the last copy out of each, which may go on when a `send` has failed."""
        self._lock = threading.Lock()

    def send(self, copies: Iterable[tuple[np.ndarray, Tensor]], after: torch.cuda.Event | None) -> None:
        """Copy each array to its int32 place once the device has passed `after`, and wait for the last. One at a time
        goes, from any thread."""
        with self._lock, torch.cuda.stream(self._stream):
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            for number, (piece, place) in enumerate(_pieces(copies)):
                turn, room = number % 2, self._rooms[number % 2][: piece.size]
                if (event := self._sent[turn]) is not None:
                    event.synchronize()
                np.copyto(room.numpy(), piece, casting="same_kind")
                place.copy_(room, non_blocking=True)
                self._sent[turn] = mark(self._device)
            for event in self._sent:
                if event is not None:
                    event.synchronize()


def _pieces(copies: Iterable[tuple[np.ndarray, Tensor]]) -> Iterator[tuple[np.ndarray, Tensor]]:
    """The arrays cut in pieces, each with its place."""
    for array, place in copies:
        for start in range(0, array.size, PIECE):
            piece = array[start : start + PIECE]
            yield piece, place[start : start + piece.size]


class HostCopy:
    """Arrays of 4-byte types on their way to the host in one copy, which nobody waits for yet."""

    def __init__(self, flat: Tensor, layout: Layout) -> None:
        """`flat` is int32: the arrays' bits, one behind the other."""
        self._layout = layout
        self._host = torch.empty(flat.shape, dtype=torch.int32, pin_memory=flat.is_cuda)
        self._host.copy_(flat, non_blocking=True)

    @classmethod
    def of(cls, tensors: list[Tensor]) -> HostCopy:
        """Of tensors that have yet to be laid so."""
        flat = torch.cat([tensor.contiguous().view(torch.int32).flatten() for tensor in tensors])
        return cls(flat, [(tensor.shape, tensor.dtype) for tensor in tensors])

    def arrays(self) -> list[np.ndarray]:
        """The numpy arrays, once the device has made the copy."""
        flat, arrays, start = self._host.numpy(), [], 0
        for shape, dtype in self._layout:
            size = math.prod(shape)
            part = flat[start : start + size].reshape(shape)
            arrays.append(part.view(np.float32) if dtype == torch.float32 else part)
            start += size
        return arrays
