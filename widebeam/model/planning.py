"""Plans of FlashInfer, made again with little of the host's time.

A wrapper's own `plan` copies each of its arrays to the device by itself, looks at each length in Python, and then calls
a compiled planner. Behind the first time only arrays differ: they go by one copy, and the planner is called with what
it was given then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ANOTHER_WAY = "this version of FlashInfer plans in another way"
ROOM = 4
"""int32 at a multiple of which each array begins: 16 bytes."""


class DeviceArrays:
    """int32 arrays on the device, filled by one copy. What comes last may be filled in part."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        rooms = [-(-size // ROOM) * ROOM for size in sizes]
        self._starts = [sum(rooms[:i]) for i in range(len(rooms))]
        self._all = torch.zeros(sum(rooms), dtype=torch.int32, device=device)
        self.views = [self._all[start : start + size] for start, size in zip(self._starts, sizes, strict=True)]

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Fill them, in stream order."""
        end = self._starts[-1] + len(arrays[-1])
        host = torch.empty(end, dtype=torch.int32, pin_memory=self._all.is_cuda)
        view = host.numpy()
        for start, array in zip(self._starts, arrays, strict=True):
            view[start : start + len(array)] = array
        self._all[:end].copy_(host, non_blocking=True)


class Planner:
    """The planner of a wrapper whose arrays are `arrays`, for graphs: numbers of rows and of sequences never change."""

    def __init__(self, wrapper: Any, arrays: DeviceArrays, staged: Callable[[], AbstractContextManager[None]]) -> None:
        """`staged`: within it the wrapper has workspaces that the compiled planner may fill."""
        self._wrapper, self._arrays, self._staged = wrapper, arrays, staged
        self._args: list[Any] | None = None
        """What the compiled planner is given: workspaces, the three arrays of `plan`, and then what stays."""

    def plan(
        self, first: Callable[[], None], rows: np.ndarray, keys: np.ndarray, lengths: np.ndarray, *others: np.ndarray
    ) -> None:
        """Plan. All are int32: `rows` and `keys` are where each sequence's queries and its keys (or pages) begin, and
        where the last ends; `lengths` its numbers of keys; `others` what else the device gets. `first` calls the
        wrapper's own method with the same."""
        if self._args is None:
            self._learn(first)
            return
        self._arrays.send((rows, keys, lengths, *others))
        wrapper, args = self._wrapper, self._args
        with self._staged():
            args[1:6] = (
                wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
                *map(torch.from_numpy, (rows, keys, lengths)),
            )  # fmt: skip
            wrapper._plan_info = wrapper._cached_module.plan(*args)

    def _learn(self, first: Callable[[], None]) -> None:
        """Plan by the wrapper's own method, and once more, now that the compiled planner is known, to see what it is
        given. All wrappers of a process share that planner's module: this one alone gets another. Raises RuntimeError
        if the wrapper does not take it, as another version of FlashInfer may not."""
        first()
        wrapper, module = self._wrapper, self._wrapper._cached_module

        def noting(*args: Any) -> Any:
            self._args = list(args)
            return module.plan(*args)

        wrapper._jit_module = SimpleNamespace(plan=noting)
        try:
            first()
        finally:
            wrapper._jit_module, wrapper._cached_module = None, module
        if self._args is None:
            raise RuntimeError(ANOTHER_WAY)
