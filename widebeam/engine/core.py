"""What every step uses: the network, the pools, the buffers, and the functions in the form in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from widebeam.constraints.arena import CatalogArena, MaskPool
from widebeam.engine.shapes import LARGE_STEP, Size, token_rung
from widebeam.engine.state import BeamState
from widebeam.errors import EngineDead
from widebeam.kv.beam import BeamKV
from widebeam.kv.context import ContextKV
from widebeam.kv.host import HostTier
from widebeam.model.attention import Plans
from widebeam.model.qwen3 import Qwen3

FATAL = (torch.AcceleratorError, EngineDead)
"""After these nothing can run any more: the device is broken, or ranks are out of step."""


@dataclass(frozen=True)
class Programs:
    """The functions that run on the device, compiled or as they are (see engine/compile.py)."""

    body: Callable[..., Any]
    """`step.prompt_body`; a graph leaves its result in BeamState.stream_TH."""
    last: Callable[..., None]
    """`step.prompt_last`, which takes what `body` gave."""
    forward_rows: Callable[..., None]
    """`step.forward_rows`"""
    advance: Callable[..., None]
    """`advance.advance`"""
    pack: Callable[..., None]
    """`packing.pack`"""
    graphed: set[Size] = field(default_factory=set)
    """What `body` and `last` are for. Prompts that find no size here run as they are, by `step`."""

    def rung(self, requests: int, tokens: int, splits: int) -> int | None:
        """The least rung of `graphed` for so many prompt tokens, unless it is much too large."""
        rung = token_rung(tokens)
        while (requests, rung, splits) not in self.graphed:
            rung = token_rung(rung + 1)
            if rung >= tokens + LARGE_STEP:
                return None
        return rung


@dataclass
class Core:
    """What every level uses and no level changes in shape."""

    model: Qwen3
    context: ContextKV
    beams: BeamKV
    state: BeamState
    plans: Plans
    programs: Programs
    catalogs: CatalogArena
    masks: MaskPool
    max_pages: int
    """Most pages of one context."""
    tier: HostTier | None = None
    """The prefix cache's pages in the host's memory."""
