"""What every step uses: the network, the pools, the buffers, and the functions in the form in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from widebeam.engine.state import BeamState
from widebeam.kv.beam import BeamKV
from widebeam.kv.context import ContextKV
from widebeam.model.attention import Plans
from widebeam.model.qwen3 import Qwen3, run_layer


@dataclass(frozen=True)
class Programs:
    """The functions that run on the device, compiled or as they are (see engine/compile.py)."""

    first_step: Callable[..., None]
    """`step.first_step`, for prompts of `padded_tokens` or fewer tokens in all."""
    first_level: Callable[..., None]
    """`advance.advance`, behind the prefill of more tokens."""
    level_step: Callable[..., None]
    """`step.level_step`."""
    step_layer: Callable[..., Tensor] = run_layer
    """How `first_step` and `level_step` run a layer."""
    prefill_layer: Callable[..., Tensor] = run_layer
    """How the prefill of more tokens runs a layer."""
    padded_tokens: int = 0
    """Up to so many tokens prompts are padded to a rung, so that a graph can replay them."""


@dataclass
class Core:
    """What every level uses and no level changes in shape."""

    model: Qwen3
    context: ContextKV
    beams: BeamKV
    state: BeamState
    plans: Plans
    programs: Programs
