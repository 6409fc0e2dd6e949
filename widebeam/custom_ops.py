"""Custom ops: functions that a compiler takes as they are, with kernels by device.

`torch.library.custom_op` does the same and more: it loads torch's compiler at the first call, 2 s even where nothing is
compiled, and looks after each call whether results alias what was given. Ours need no gradients, and that they alias
nothing is tested (`torch.library.opcheck`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

LIBRARY = torch.library.Library("widebeam", "FRAGMENT")
F = TypeVar("F", bound=Callable[..., Any])


def custom_op(name: str, mutates_args: Sequence[str] = ()) -> Callable[[F], F]:
    """The op `widebeam::name`, with the decorated function for every device that has no kernel of its own."""

    def define(function: F) -> F:
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return cast(F, getattr(torch.ops.widebeam, name).default)

    return define


def register_fake(op: Callable[..., Any]) -> Callable[[F], F]:
    """The decorated function gives results of the op's shapes and types, without their values."""

    def register(function: F) -> F:
        torch.library.register_fake(op, function, lib=LIBRARY)  # type: ignore[arg-type]
        return function

    return register


def register_cuda(op: Callable[..., Any]) -> Callable[[F], F]:
    """The decorated function is the op's kernel on CUDA."""

    def register(function: F) -> F:
        LIBRARY.impl(op, function, "CUDA")
        return function

    return register
