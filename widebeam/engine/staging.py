"""One copy to the device and one back, however many arrays a wave has. Neither waits for the device."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float64): torch.float64}
ROOM = 16
"""Bytes at a multiple of which each array begins: compiled code copies what does not."""


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


class HostCopy:
    """Tensors (of 4-byte types) on their way to the host in one copy, which nobody waits for yet."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        flat = torch.cat([tensor.contiguous().view(torch.int32).flatten() for tensor in tensors])
        self._host = torch.empty(flat.shape, dtype=torch.int32, pin_memory=flat.is_cuda)
        self._host.copy_(flat, non_blocking=True)

    def arrays(self) -> list[np.ndarray]:
        """The tensors as numpy arrays, once the device has made the copy."""
        flat, arrays, start = self._host.numpy(), [], 0
        for shape, dtype in self._layout:
            part = flat[start : start + shape.numel()].reshape(shape)
            arrays.append(part.view(np.float32) if dtype == torch.float32 else part)
            start += shape.numel()
        return arrays
