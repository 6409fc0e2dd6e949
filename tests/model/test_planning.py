"""Plans made again: what a stand-in for FlashInfer's compiled planner is given. It needs a GPU itself, where
tests/model/test_attention.py plans again and compares with plain attention."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from widebeam.model.planning import DeviceArrays, Planner

CPU = torch.device("cpu")
SIZES = [3, 3, 2, 9]


class Wrapper:
    """As much of FlashInfer's as planning sees: all of a process get the same module."""

    def __init__(self, module: Any, name: str) -> None:
        self._shared, self._name = module, name
        self._jit_module: Any = None
        self._cached_module: Any = None
        self._int_workspace_buffer, self._pin_memory_int_workspace_buffer = f"{name} device", f"{name} pinned"
        self._plan_info: Any = None
        self.called = 0

    def plan(self, *arrays: torch.Tensor) -> None:
        self.called += 1
        self._cached_module = self._jit_module or self._shared
        workspaces = f"{self._name} float", self._int_workspace_buffer, self._pin_memory_int_workspace_buffer
        self._plan_info = self._cached_module.plan(*workspaces, *arrays, f"rows of {self._name}", True)


class Module:
    """Says what it was given."""

    def plan(self, *args: Any) -> list[Any]:
        return [arg.tolist() if isinstance(arg, torch.Tensor) else arg for arg in args]


def plan(planner: Planner, wrapper: Wrapper, seed: int) -> list[Any]:
    """What the compiled planner was given in the end, and what it should have been."""
    rng = np.random.default_rng(seed)
    rows, keys, lengths = (rng.integers(0, 99, size, dtype=np.int32) for size in (3, 3, 2))
    arrays = rows, keys, lengths, rng.integers(0, 99, 1 + seed, dtype=np.int32)
    planner.plan(lambda: wrapper.plan(*map(torch.from_numpy, (rows, keys, lengths))), *arrays)
    name = wrapper._name
    given = [array.tolist() for array in (rows, keys, lengths)]
    assert wrapper._plan_info == [f"{name} float", f"{name} device", f"{name} pinned", *given, f"rows of {name}", True]
    return [array.tolist() for array in arrays]


def test_later_plans_bring_new_arrays_to_what_the_first_one_gave() -> None:
    arrays = DeviceArrays(SIZES, CPU)
    wrapper = Wrapper(Module(), "a")
    planner = Planner(wrapper, arrays, nullcontext)
    plan(planner, wrapper, 0)
    called = wrapper.called
    for seed in (5, 2, 7):
        brought = plan(planner, wrapper, seed)
        *fixed, last = [view.tolist() for view in arrays.views]
        assert fixed == brought[:3] and last[: 1 + seed] == brought[3]
        wrapper._pin_memory_int_workspace_buffer = "a pinned"
    assert wrapper.called == called
    assert all(view.data_ptr() % 16 == 0 for view in arrays.views), "kernels read 16 bytes at once"


def test_a_wrapper_that_plans_in_another_way_is_told() -> None:
    """Not planned twice each time, which nobody would notice."""

    class Other(Wrapper):
        def plan(self, *arrays: torch.Tensor) -> None:
            self._cached_module, self._plan_info = self._shared, list(arrays)

    wrapper = Other(Module(), "a")
    with pytest.raises(RuntimeError, match="plans in another way"):
        plan(Planner(wrapper, DeviceArrays(SIZES, CPU), nullcontext), wrapper, 0)


def test_engines_of_one_process_learn_apart() -> None:
    """While one learns, another plans by the module that both share."""
    module = Module()
    wrappers = [Wrapper(module, name) for name in "ab"]
    a, b = (Planner(wrapper, DeviceArrays(SIZES, CPU), nullcontext) for wrapper in wrappers)
    plan(b, wrappers[1], 1)
    own = wrappers[0].plan

    def beside(*arrays: torch.Tensor) -> None:
        own(*arrays)
        plan(b, wrappers[1], 2)

    wrappers[0].plan = beside  # type: ignore[method-assign]
    plan(a, wrappers[0], 3)
    plan(a, wrappers[0], 4)
    plan(b, wrappers[1], 5)
    assert vars(module) == {} and wrappers[0]._jit_module is None and wrappers[0]._cached_module is module
