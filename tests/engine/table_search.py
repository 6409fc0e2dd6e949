"""The engine's scoring, selection and bookkeeping, run over a table of logits instead of a network.

The network is the only thing left out: `hidden` are the logits themselves and the head is the identity, so that the
float32 values on which the engine decides are known exactly.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.oracle import Found, Prefix
from widebeam.constraints.arena import MASK_BYTES, NODE_BYTES, CatalogArena, MaskPool, num_places
from widebeam.engine.advance import advance
from widebeam.engine.compile import EAGER
from widebeam.engine.core import Core
from widebeam.engine.flight import unpack
from widebeam.engine.packing import collect
from widebeam.engine.search import send_masks, wave_data
from widebeam.engine.state import BeamState
from widebeam.engine.wave import Search, Wave
from widebeam.model.layers import float32_linear
from widebeam.model.parallel import WHOLE


class Table:
    """Logits for any prefix, seeded; coarse values make ties common."""

    def __init__(self, vocab_size: int, seed: int, step: float = 0.5) -> None:
        self.vocab_size, self.seed, self.step = vocab_size, seed, step
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.head_VH, self.shard = torch.eye(vocab_size), WHOLE

    def row(self, prefix: Prefix) -> Tensor:
        rng = np.random.default_rng([self.seed, *prefix])
        return torch.from_numpy(np.round(rng.normal(0, 1.5, self.vocab_size) / self.step) * self.step).float()

    def logits(self, hidden: Tensor, head: Tensor | None = None) -> Tensor:
        return float32_linear(hidden, self.head_VH if head is None else head)


def run(tables: list[Table], searches: list[Search], catalog: Any = None) -> list[list[Found]]:
    """Search all of them in one wave; table b answers for search b."""
    model: Any = tables[0]
    vocab_size = model.vocab_size
    wave = Wave(searches, max_rows=4096)
    device = torch.device("cpu")
    state = BeamState(4096, 16, 16, 1, vocab_size, torch.float32, device)
    room = 7 + num_places(catalog) if catalog is not None else 1
    arena, pool = CatalogArena(room * NODE_BYTES, device), MaskPool((3 + wave.mask_places) * MASK_BYTES, device)
    core = Core(model, None, None, state, None, EAGER, arena, pool, 0)  # type: ignore[arg-type]
    trie = None
    if catalog is not None:
        arena.acquire(7)  # so that its nodes do not begin at place 0, nor the masks
        pool.acquire(3)
        arena.reserve(catalog)
        arena.upload(catalog)
        trie = arena.trie(catalog)
    wave.mask_lease = pool.acquire(wave.mask_places)
    data = wave_data(core, wave)
    send_masks(core, wave)
    state.start(torch.tensor(len(searches)), wave.requests)
    for level, shape in enumerate(wave.shapes):
        for row in range(shape.rows_in):
            request = int(state.request_R[row])
            if request < len(searches):
                state.hidden_RH[row] = tables[request].row(prefix_of(state, row, level))
        advance(core, data, trie.level(level, state.brought) if trie is not None else None, shape)
    outcomes, _ = unpack(wave.searches, *collect(core, wave).arrays())
    return [
        [Found(tuple(s.token_ids), s.cum_logprob, s.score, s.finish_reason) for s in outcome]  # type: ignore[union-attr]
        for outcome in outcomes
    ]


def prefix_of(state: BeamState, row: int, level: int) -> Prefix:
    """Tokens that a live row has decoded, by its path through the history."""
    return tuple(int(state.token_JR[j, state.path_RJ[row, j]]) for j in range(level))
