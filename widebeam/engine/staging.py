"""One copy to the device and one back, however many arrays a wave has."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ALIGN = 16


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays as views of one device buffer, filled by one asynchronous copy from pinned memory."""
    offsets, size = {}, 0
    for name, array in arrays.items():
        offsets[name] = size
        size += -(-array.nbytes // ALIGN) * ALIGN
    host = torch.empty(max(size, ALIGN), dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = host.numpy()
    for name, array in arrays.items():
        view[offsets[name] : offsets[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    buffer = host.to(device, non_blocking=True)

    def part(name: str, array: np.ndarray) -> Tensor:
        flat = buffer[offsets[name] : offsets[name] + array.nbytes]
        return flat.view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)

    return {name: part(name, array) for name, array in arrays.items()}


def to_host(tensors: list[Tensor]) -> list[np.ndarray]:
    """The tensors (4-byte types) as numpy arrays, brought over by one copy. Waits for the device."""
    flat = torch.cat([tensor.contiguous().view(torch.int32).flatten() for tensor in tensors]).cpu().numpy()
    arrays, start = [], 0
    for tensor in tensors:
        part = flat[start : start + tensor.numel()].reshape(tensor.shape)
        arrays.append(part.view(np.float32) if tensor.dtype == torch.float32 else part)
        start += tensor.numel()
    return arrays
