"""How the device functions are compiled: every option in one place.

A level is one graph (forward, head, normaliser, legality, selection, re-pathing) that CUDA-graph trees replay; its
layers are one nested region, so that 28 of them compile like one. Prefill compiles by layer and is launched, since its
kernels are long. Nothing here changes what a search returns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from widebeam.constraints.trie import DeviceTrie
from widebeam.engine.state import BeamState
from widebeam.engine.step import Programs, level_step
from widebeam.kv.beam import BeamKV
from widebeam.kv.context import ContextKV
from widebeam.model.qwen3 import run_layer

EAGER = Programs(level_step)
"""The functions as they are: the CPU's, and what every compiled form must equal."""


def compiled_programs(*, autotune: bool) -> Programs:
    """Compiled forms for a GPU. `autotune` searches for the fastest kernels, which takes minutes."""
    return Programs(
        level_step=torch.compile(
            level_step, mode="max-autotune" if autotune else "reduce-overhead", fullgraph=True, dynamic=False
        ),
        level_layer=torch.compiler.nested_compile_region(run_layer),
        prefill_layer=torch.compile(run_layer, fullgraph=True, dynamic=True),
    )


def keep_in_place(buffers: Iterable[Tensor]) -> None:
    """Promise the compiler that these never move: graphs then use them directly instead of copying them in."""
    for buffer in buffers:
        torch._dynamo.mark_static_address(buffer, guard=False)


def static_buffers(state: BeamState, context: ContextKV, beams: BeamKV) -> list[Tensor]:
    """Everything of an engine that a level reads or writes at a fixed address, weights apart."""
    own = [value for value in vars(state).values() if isinstance(value, Tensor)]
    return [*own, *state.finished, *context.k, *context.v, *beams.k, *beams.v]


def static_arrays(trie: DeviceTrie) -> list[Tensor]:
    """A catalog version's arrays."""
    return [trie.first_child, trie.code, trie.terminal, *trie.codebooks, *trie.heads]
