"""`column_best` as Triton kernels and their launcher. Nothing waits for the device; graphs may record it.

One pass reads the logits: each program takes some columns of a row. Another merges the log-sum-exp of their parts.

Letters: as in `segment_top`.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

READ = tl.constexpr(8192)
"""Logits that a program reads."""


@triton.jit
def _logsumexp(value: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """Of all values; `peak` is their maximum. Infinite ones and NaN come out as in torch."""
    peak = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    return tl.log(tl.sum(tl.exp(value - peak))) + peak


@triton.jit
def _columns(
    logits: tl.tensor,
    best: tl.tensor,
    partial: tl.tensor,
    V: tl.tensor,
    N: tl.tensor,
    parts: tl.tensor,
    E: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Maxima of some columns of a row, and the log-sum-exp of their tokens: `partial` [R, parts]."""
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    column = program % parts * COLUMNS + tl.arange(0, COLUMNS)
    token = column[:, None] * E + tl.arange(0, E)[None, :]
    value = tl.load(logits + row * V + token, token < V, float("-inf"))
    top = tl.max(value, 1)
    tl.store(best + row * N + column, top, column < N)
    tl.store(partial + program, _logsumexp(value, tl.max(top, 0)))


@triton.jit
def _merge(partial: tl.tensor, lse: tl.tensor, parts: tl.tensor, WIDTH: tl.constexpr) -> None:
    row = tl.program_id(0)
    index = tl.arange(0, WIDTH)
    value = tl.load(partial + row * parts + index, index < parts, float("-inf"))
    tl.store(lse + row, _logsumexp(value, tl.max(value, 0)))


def column_best(logits: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """As the plain op."""
    R, V = logits.shape
    N = triton.cdiv(V, height)
    columns = READ.value // height
    parts = triton.cdiv(N, columns)
    best, lse, partial = logits.new_empty(R, N), logits.new_empty(R), logits.new_empty(R, parts)
    if R:
        with torch.cuda.device_of(logits):
            _columns[R * parts,](logits, best, partial, V, N, parts, E=height, COLUMNS=columns, num_warps=8)
            _merge[R,](partial, lse, parts, WIDTH=triton.next_power_of_2(parts), num_warps=1)
    return best, lse
