"""`pack` as one Triton kernel and its launcher. Nothing waits for the device.

A program takes some places at one level; behind the levels, some take what there is once for a place or a request. The
kernel is specialised on no size, so that waves of any shape run what the first one compiled, and it is given whole
buffers, which begin at the same addresses in every wave: views of them would cost the host as much as the launch.

Letters: as in `packing`.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from widebeam.engine.state import BeamState

BLOCK = tl.constexpr(128)
"""Places that a program takes."""


@triton.jit
def _bits(value: tl.tensor) -> tl.tensor:
    """All bits of floats, the low 32 of integers."""
    return value.to(tl.int32, bitcast=value.dtype == tl.float32)


@triton.jit
def _copy(source: tl.tensor, out: tl.tensor, place: tl.tensor, mask: tl.tensor) -> None:
    tl.store(out + place, _bits(tl.load(source + place, mask)), mask)


@triton.jit(do_not_specialize=["F", "L", "B", "columns", "rows"])
def _pack(
    score: tl.tensor, cum: tl.tensor, length: tl.tensor, token: tl.tensor, logprob: tl.tensor, node: tl.tensor,
    reason: tl.tensor, path: tl.tensor, token_JR: tl.tensor, logprob_JR: tl.tensor, broken: tl.tensor, out: tl.tensor,
    F: tl.tensor, L: tl.tensor, B: tl.tensor, columns: tl.tensor, rows: tl.tensor,
) -> None:  # fmt: skip
    """`path` has rows of `columns`, the history has rows of `rows`. Grid: blocks of places or requests, L + 1."""
    place, level = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    mine = place < F
    if level < L:
        last = tl.load(length + place, mine, 0) - 1
        living = tl.load(score + place, mine, float("-inf")) > float("-inf")
        is_before, is_last = living & (level < last), living & (level == last)
        row = tl.load(path + place.to(tl.int64) * columns + level, is_before, 0)
        at = level.to(tl.int64) * rows + row
        tokens, own = tl.load(token_JR + at, is_before, 0), tl.load(token + place, is_last, 0)
        tl.store(out + level * F + place, tl.where(is_last, _bits(own), tokens), mine)
        logprobs, own = tl.load(logprob_JR + at, is_before, 0.0), tl.load(logprob + place, is_last, 0.0)
        tl.store(out + (L + level) * F + place, _bits(tl.where(is_last, own, logprobs)), mine)
    else:
        out += 2 * L * F
        _copy(length, out, place, mine)
        _copy(node, out + F, place, mine)
        _copy(reason, out + 2 * F, place, mine)
        _copy(score, out + 3 * F, place, mine)
        _copy(cum, out + 4 * F, place, mine)
        _copy(broken, out + 5 * F, place, place < B)


def pack(state: BeamState, places: int, levels: int) -> Tensor:
    """As the plain function."""
    done, history, broken_B = state.finished, state.token_JR, state.broken_B
    B = broken_B.shape[0]
    out = torch.empty((2 * levels + 5) * places + B, dtype=torch.int32, device=broken_B.device)
    with torch.cuda.device_of(out):
        _pack[triton.cdiv(max(places, B), BLOCK.value), levels + 1](
            *done, history, state.logprob_JR, broken_B, out,
            places, levels, B, done.path.stride(0), history.stride(0),
        )  # fmt: skip
    return out
