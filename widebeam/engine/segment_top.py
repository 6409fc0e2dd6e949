"""The two heavy steps of selection, as custom ops: plain PyTorch for every device, Triton kernels on CUDA.

`segment_top` finds each segment's best candidates without sorting all of them; `column_best` reads logits once for the
maximum of each column and the row's log-sum-exp. The plain implementations are the CPU's path and the kernels' oracle.

Letters: R rows, V vocabulary, N columns, E tokens of a column, M candidates, B segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from widebeam.custom_ops import custom_op, register_cuda, register_fake

MOST = 1 << 31
"""Limits above this count as this, so that the places of many segments without a limit fit in int64."""


@custom_op("segment_top")
def segment_top(score: Tensor, start: Tensor, limit: Tensor, size: int, by_position: bool) -> tuple[Tensor, Tensor]:
    """The best of each segment: (order [size] int64, an index into the candidates, real [size] bool).

    All are contiguous. `score` [M] is float32 without NaN, -inf if dead. Segment s holds the candidates from `start[s]`
    up to `start[s + 1]`: start [B + 1] int64 ascends; candidates outside of all segments belong to nobody. `limit` [B]
    int64 says how many living candidates of a segment are taken: the best by score descending, then position
    ascending. They lie behind the places of earlier segments, of which each has min(limit, MOST), in that order or, if
    `by_position`, in ascending position. Those whose place would be `size` or more are dropped. Places that nobody
    fills hold order 0 and real False.
    """
    position_M = torch.arange(score.shape[0], device=score.device)
    segment_M = torch.searchsorted(start, position_M, right=True) - 1
    outside_M = (segment_M < 0) | (segment_M >= limit.shape[0])
    segment_M = segment_M.masked_fill(outside_M | (score == -torch.inf), limit.shape[0])
    # Two stable sorts: by segment, of those by score, of those by position. Whoever is not to be taken comes last.
    best_M = torch.sort(score, descending=True, stable=True).indices
    best_M = best_M[torch.sort(segment_M[best_M], stable=True).indices]
    taken = best_M[_rank(segment_M[best_M]) < torch.cat([limit, limit.new_zeros(1)])[segment_M[best_M]]]
    if by_position:
        taken = taken.sort().values
    most = limit.clamp(max=MOST)
    segment = segment_M[taken]
    place = (most.cumsum(0) - most)[segment] + _rank(segment)
    fits = place < size
    order = taken.new_zeros(size).scatter_(0, place[fits], taken[fits])
    real = fits.new_zeros(size).scatter_(0, place[fits], True)
    return order, real


def _rank(segment: Tensor) -> Tensor:
    """How many of the same segment stand before each one; segments ascend."""
    return torch.arange(segment.shape[0], device=segment.device) - torch.searchsorted(segment, segment)


@register_fake(segment_top)
def _(score: Tensor, start: Tensor, limit: Tensor, size: int, by_position: bool) -> tuple[Tensor, Tensor]:
    return score.new_empty(size, dtype=torch.int64), score.new_empty(size, dtype=torch.bool)


@register_cuda(segment_top)
def _(score: Tensor, start: Tensor, limit: Tensor, size: int, by_position: bool) -> tuple[Tensor, Tensor]:
    from widebeam.engine import segment_top_triton

    return segment_top_triton.segment_top(score, start, limit, size, by_position)


@custom_op("column_best")
def column_best(logits: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Contiguous float32 logits [R, V] -> (maximum of each column [R, N], log-sum-exp of each row [R]).

    A column is `height` = E consecutive tokens, a power of two; the last one has fewer where E does not divide V.
    Log-sum-exp of a row with NaN or infinities is what `torch.logsumexp` gives; the maximum of a column with NaN is
    anything.
    """
    whole = logits.shape[1] // height * height
    best = [logits[:, :whole].unflatten(1, (-1, height)).amax(2)] if whole else []
    if whole < logits.shape[1]:
        best.append(logits[:, whole:].amax(1, keepdim=True))
    return torch.cat(best, 1), logits.logsumexp(1)


@register_fake(column_best)
def _(logits: Tensor, height: int) -> tuple[Tensor, Tensor]:
    R, V = logits.shape
    return logits.new_empty(R, (V + height - 1) // height), logits.new_empty(R)


@register_cuda(column_best)
def _(logits: Tensor, height: int) -> tuple[Tensor, Tensor]:
    from widebeam.engine import column_best_triton

    return column_best_triton.column_best(logits, height)
