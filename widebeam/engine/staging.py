"""Copies to the device and back.

A wave has one copy of each kind, however many arrays, and waits for neither. What is larger goes piece by piece beside
the waves.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int64", "int32", "float64", "bool")}
PIECE = 2 << 20
"""Elements of a long array that are copied together: 8 MiB, 0.2 ms of an H200's bus."""
SPARE = 2 << 20
"""Bytes of a place for arrays whose sizes differ: 512 levels of 256 requests take half of it."""
ROOM = 16
"""Bytes at a multiple of which each array begins: compiled code copies what does not."""

Parts = list[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and types of what lies one behind the other."""
Layout = tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]
"""Name, shape and type of arrays that lie one behind the other."""


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays, of DTYPES, as views of one device buffer, filled by one asynchronous copy from pinned memory."""
    return _views(_layout(arrays), _packed(arrays, device).to(device, non_blocking=True))


class Staged(NamedTuple):
    """Arrays on the device, one behind the other."""

    layout: Layout
    bytes: Tensor

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray], device: torch.device) -> Staged:
        return cls(_layout(arrays), _packed(arrays, device).to(device, non_blocking=True))


class Places:
    """Memory of the device for what every wave brings: arrays of the same names and sizes always lie in the same place,
    so that graphs find them there. What is put there takes the place of what was there before, in stream order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[Layout, Tensor] = {}
        self._views: dict[tuple[Layout, Layout], dict[str, Tensor]] = {}
        self._promise: Callable[[Tensor], None] = lambda _: None

    def promise(self, promise: Callable[[Tensor], None]) -> None:
        """Tell whom it concerns of each tensor that will never move."""
        self._promise = promise
        self._views.clear()

    def put(self, arrays: dict[str, np.ndarray], behind: dict[str, np.ndarray] | None = None) -> dict[str, Tensor]:
        """The arrays, of DTYPES, by one asynchronous copy from pinned memory. `behind`: others, up to SPARE, of which
        there may be more or less, or larger ones, in another wave: that moves none of `arrays`."""
        both = arrays if behind is None else arrays | behind
        return self._take(_layout(arrays), _layout(behind or {}), _packed(both, self._device), behind is not None)

    def copy(self, staged: Staged) -> dict[str, Tensor]:
        """The same of what is on the device already."""
        return self._take(staged.layout, (), staged.bytes)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: type) -> Tensor:
        """A tensor of nothing but zeros."""
        layout = ((name, shape, np.dtype(dtype)),)
        buffer = self._buffer(layout, spare=False)
        buffer.zero_()
        return self._of(layout, (), buffer)[name]

    def _take(self, layout: Layout, behind: Layout, source: Tensor, spare: bool = False) -> dict[str, Tensor]:
        buffer = self._buffer(layout, spare)
        buffer[: len(source)].copy_(source, non_blocking=True)
        return self._of(layout, behind, buffer)

    def _buffer(self, layout: Layout, spare: bool) -> Tensor:
        if layout not in self._buffers:
            size = _size(layout) + spare * SPARE
            self._buffers[layout] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffers[layout]

    def _of(self, layout: Layout, behind: Layout, buffer: Tensor) -> dict[str, Tensor]:
        if (layout, behind) not in self._views:
            self._views[layout, behind] = views = _views(layout + behind, buffer)
            for view in views.values():
                self._promise(view)
        return self._views[layout, behind]


def _layout(arrays: dict[str, np.ndarray]) -> Layout:
    return tuple([(name, array.shape, array.dtype) for name, array in arrays.items()])


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ROOM) * ROOM


def _size(layout: Layout) -> int:
    return sum([_rounded(math.prod(shape) * dtype.itemsize) for _, shape, dtype in layout])


def _packed(arrays: dict[str, np.ndarray], device: torch.device) -> Tensor:
    """All bytes, each array's from a multiple of ROOM on, in pinned memory if they go to a GPU.

    Little is done array by array, since the host's time counts before the first kernel runs.
    """
    size = sum([_rounded(array.nbytes) for array in arrays.values()])
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view, start = host.numpy(), 0
    for array in arrays.values():
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _rounded(array.nbytes)
    return host


def _views(layout: Layout, buffer: Tensor) -> dict[str, Tensor]:
    """The arrays of `_packed`, in a buffer like it."""
    views, start = {}, 0
    of_dtype = {dtype: buffer.view(DTYPES[dtype]) for _, _, dtype in layout}
    for name, shape, dtype in layout:
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        views[name] = of_dtype[dtype].as_strided(shape, strides, start // dtype.itemsize)
        start += _rounded(math.prod(shape) * dtype.itemsize)
    return views


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

    def __init__(self, flat: Tensor, parts: Parts) -> None:
        """`flat` is int32 and begins with the arrays' bits, one behind the other."""
        self._parts = parts
        size = sum(math.prod(shape) for shape, _ in parts)
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=flat.is_cuda)
        self._host.copy_(flat[:size], non_blocking=True)

    @classmethod
    def of(cls, tensors: list[Tensor]) -> HostCopy:
        """Of tensors that have yet to be laid so."""
        flat = torch.cat([tensor.contiguous().view(torch.int32).flatten() for tensor in tensors])
        return cls(flat, [(tensor.shape, tensor.dtype) for tensor in tensors])

    def arrays(self) -> list[np.ndarray]:
        """The numpy arrays, once the device has made the copy."""
        flat, arrays, start = self._host.numpy(), [], 0
        for shape, dtype in self._parts:
            size = math.prod(shape)
            part = flat[start : start + size].reshape(shape)
            arrays.append(part.view(np.float32) if dtype == torch.float32 else part)
            start += size
        return arrays
