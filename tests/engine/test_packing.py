"""What a wave sends home, against plain loops over the device's buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from widebeam.engine.packing import pack, parts
from widebeam.engine.staging import HostCopy
from widebeam.engine.state import BeamState

NOWHERE = 2**31 - 1
"""As a row it lies outside of every buffer."""


def random_state(rows: int, requests: int, levels: int, empty: float, seed: int) -> BeamState:
    """Any bits in every buffer, but living places have lengths up to `levels` and paths to rows that there are.

    What nobody should follow leads nowhere: paths behind a sequence's end and those of empty places.
    """
    rng = np.random.default_rng(seed)
    state = BeamState(rows, requests, levels, 1, 1, torch.float32, torch.device("cpu"))
    done = state.finished
    for buffer in (*done, state.token_JR, state.logprob_JR, state.broken_B):
        bound = 2 ** (8 * buffer.element_size() - 1)
        integers = rng.integers(-bound, bound, buffer.shape, dtype=f"int{8 * buffer.element_size()}")
        buffer.copy_(torch.from_numpy(integers).view(buffer.dtype))
    size, columns = done.path.shape
    length = rng.integers(1, levels + 1, size)
    score = np.where(rng.random(size) < empty, -np.inf, rng.normal(-5, 3, size))
    followed = (np.arange(columns) < length[:, None] - 1) & (score[:, None] > -np.inf)
    path = np.where(followed, rng.integers(0, size, (size, columns)), NOWHERE)
    for buffer, values in ((done.length, length), (done.score, score), (done.path, path)):
        buffer.copy_(torch.from_numpy(values))
    return state


def bits(tensor: Tensor) -> Any:
    """int32 values: all bits of floats, the low 32 of integers."""
    array = tensor.numpy()
    return (array.view(np.int32) if array.dtype == np.float32 else array.astype(np.int32)).tolist()


def expected(state: BeamState, places: int, levels: int) -> list[Any]:
    done, L, F = state.finished, levels, places
    path, length, score = done.path.tolist(), done.length.tolist(), done.score.tolist()

    def spelled(history: Tensor, last: Tensor) -> list[list[int]]:
        history_JR, last_F = bits(history), bits(last)
        rows = [[0] * F for _ in range(L)]
        for f in range(F):
            if score[f] > float("-inf"):
                for level in range(length[f] - 1):
                    rows[level][f] = history_JR[level][path[f][level]]
                rows[length[f] - 1][f] = last_F[f]
        return rows

    return [
        spelled(state.token_JR, done.token),
        spelled(state.logprob_JR, done.logprob),
        [bits(each)[:F] for each in (done.length, done.node, done.reason)],
        [bits(each)[:F] for each in (done.score, done.cum)],
        bits(state.broken_B),
    ]


@settings(max_examples=200)
@given(
    places=st.integers(1, 40),
    spare=st.integers(0, 9),
    requests=st.integers(1, 60),
    levels=st.integers(1, 20),
    empty=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_sequences_come_home(places: int, spare: int, requests: int, levels: int, empty: float, seed: int) -> None:
    state = random_state(places + spare, requests, levels, empty, seed)
    core: Any = SimpleNamespace(state=state)
    pack(core, places, levels)
    arrays = HostCopy(state.home, parts(state, places, levels)).arrays()
    assert [array.dtype.name for array in arrays] == ["int32", "float32", "int32", "float32", "int32"]
    assert [array.view(np.int32).tolist() for array in arrays] == expected(state, places, levels)
