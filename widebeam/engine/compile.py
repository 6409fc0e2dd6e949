"""How the device functions are compiled: every option in one place.

A level is one graph (forward, head, normaliser, legality, selection, re-pathing) that CUDA-graph trees replay; its
layers are one nested region, so that 28 of them compile like one. So are prefill and level 0 of short prompts; the
prefill of long ones compiles by layer and is launched, since its kernels are long. Nothing here changes what a search
returns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from widebeam.constraints.trie import DeviceTrie
from widebeam.engine.advance import advance
from widebeam.engine.core import Programs
from widebeam.engine.state import BeamState
from widebeam.engine.step import first_step, level_step
from widebeam.kv.beam import BeamKV
from widebeam.kv.context import ContextKV
from widebeam.model.qwen3 import run_layer

EAGER = Programs(first_step, advance, level_step)
"""The functions as they are: the CPU's, and what every compiled form must equal."""
PADDED_TOKENS = 2048
"""Prefill of fewer tokens takes less time on an H200 than launching its kernels one by one."""
SHAPES = 512
"""Shapes of a level that may be compiled; one more is an error of torch's, since a ladder has far fewer."""


def compiled_programs() -> Programs:
    """Compiled forms for a GPU, with cuBLAS for the products: it won nearly every autotuning at these sizes."""
    torch._dynamo.config.recompile_limit = SHAPES
    torch._dynamo.config.accumulated_recompile_limit = SHAPES

    def graphed(function: Callable[..., None]) -> Callable[..., None]:
        return torch.compile(function, mode="reduce-overhead", fullgraph=True, dynamic=False)

    return Programs(
        first_step=graphed(first_step),
        first_level=graphed(advance),
        level_step=graphed(level_step),
        step_layer=torch.compiler.nested_compile_region(run_layer),
        prefill_layer=torch.compile(run_layer, fullgraph=True, dynamic=True),
        padded_tokens=PADDED_TOKENS,
    )


def keep_in_place(state: BeamState, context: ContextKV, beams: BeamKV) -> None:
    """Promise the compiler that what a level reads and writes never moves: graphs then use it where it is."""
    own = [value for value in vars(state).values() if isinstance(value, Tensor)]
    for buffer in [*own, *state.finished, *context.k, *context.v, *beams.k, *beams.v]:
        torch._dynamo.mark_static_address(buffer, guard=False)


def keep_trie_in_place(trie: DeviceTrie) -> None:
    """The same for a catalog version's arrays."""
    for array in trie.arrays:
        torch._dynamo.mark_static_address(array, guard=False)
