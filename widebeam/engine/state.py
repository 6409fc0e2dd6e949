"""The device's memory of a search: buffers at fixed addresses that every level reads and writes.

Letters: B requests of the wave (index B is padding), R rows, F finished sequences, J decoded tokens, V vocabulary,
H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from widebeam.constraints.trie import Masks
from widebeam.engine.pruning import Pruning
from widebeam.engine.shapes import depth_rung
from widebeam.engine.staging import Places

REASONS = ("length", "stop", "item")
"""Finish reasons by their code on the device."""
LENGTH, STOP, ITEM = range(3)


class Finished(NamedTuple):
    """Sequences that have ended, request by request, best first; an empty place has score -inf."""

    score: Tensor  # float32 [F], cum / length ** length_penalty
    cum: Tensor  # float32 [F]
    length: Tensor  # int64 [F]
    token: Tensor  # int64 [F], the last token
    logprob: Tensor  # float32 [F], of the last token
    node: Tensor  # int64 [F], catalog node it ends at
    reason: Tensor  # int64 [F], see REASONS
    path: Tensor  # int32 [F, J], rows of the tokens before the last

    def head(self, places: int, columns: int) -> Finished:
        """Views of the first places and, of paths, the first columns."""
        views = Finished(*(array[:places] for array in self))
        return views._replace(path=views.path[:, :columns])


class BeamState:
    """Live rows, finished sequences and the history that both point into, for one wave at a time.

    Every buffer is larger than a level ever uses: to a compiler, using all of one is another case than using a part.
    """

    def __init__(
        self, max_rows: int, max_requests: int, max_levels: int, group_tokens: int, hidden_size: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows, columns = max_rows + 1, 2 * depth_rung(max_levels) + 1
        self.level = zeros(1)  # one element: indexing with a 0-d tensor would be read back by the host
        self.cum_R = zeros(rows, dtype=torch.float32)
        self.token_R = zeros(rows)
        self.node_R = zeros(rows)
        self.request_R = zeros(rows)
        self.first_row_B1 = zeros(max_requests + 2)  # where each request's rows begin, and at B where all end
        self.key_R = zeros(rows, dtype=torch.float32)  # this and the next two: see stochastic.py
        self.share_R = zeros(rows, dtype=torch.float32)
        self.hash_R = zeros(rows)
        self.hidden_RH = zeros(rows, hidden_size, dtype=dtype)
        self.stream_TH = zeros(group_tokens + 1, hidden_size, dtype=dtype)  # see compile.kept_body
        self.path_RJ = zeros(rows, columns, dtype=torch.int32)
        self.token_JR = zeros(columns, rows, dtype=torch.int32)
        self.logprob_JR = zeros(columns, rows, dtype=torch.float32)
        self.broken_B = zeros(max_requests + 1, dtype=torch.int32)
        self.finished = Finished(
            score=zeros(rows, dtype=torch.float32),
            cum=zeros(rows, dtype=torch.float32),
            length=zeros(rows),
            token=zeros(rows),
            logprob=zeros(rows, dtype=torch.float32),
            node=zeros(rows),
            reason=zeros(rows),
            path=zeros(rows, columns, dtype=torch.int32),
        )
        self.finished_key_F = zeros(rows, dtype=torch.float32)  # what a sample is kept by
        places = (2 * depth_rung(max_levels) + 5) * rows + max_requests + 2
        self.home = zeros(places, dtype=torch.int32)  # what a wave found, see packing.py
        self.brought = Places(device)

    def start(self, num_requests: Tensor, requests: int) -> None:
        """Make one live row for each real request: its prompt, at the catalog's root, with nothing decoded."""
        row_B = torch.arange(requests, device=self.level.device)
        real_B = row_B < num_requests
        self.level.zero_()
        self.cum_R[:requests].copy_(torch.where(real_B, 0.0, -torch.inf))
        self.node_R[:requests].zero_()
        self.request_R[:requests].copy_(torch.where(real_B, row_B, requests))
        self.first_row_B1[: requests + 1].copy_(torch.arange(requests + 1, device=row_B.device).minimum(num_requests))
        self.broken_B.zero_()
        self.finished.score.fill_(-torch.inf)

    def set_aside(self, requests: int, rows: int, columns: int, noisy: bool) -> Callable[[], None]:
        """Copy what a wave of this size has here between two levels, so that another may use the buffers; what is
        returned puts it back. Both lie in stream order. `noisy`: some request wants a sample."""
        mine = [
            self.level, self.first_row_B1[: requests + 1], self.broken_B,
            *(each[:rows] for each in (self.cum_R, self.token_R, self.node_R, self.request_R)),
            self.path_RJ[:rows, :columns], self.token_JR[:columns, :rows], self.logprob_JR[:columns, :rows],
            *self.finished.head(rows, columns),
        ]  # fmt: skip
        if noisy:
            mine += [each[:rows] for each in (self.key_R, self.share_R, self.hash_R, self.finished_key_F)]
        copies = [each.clone() for each in mine]

        def put_back() -> None:
            for each, copy in zip(mine, copies, strict=True):
                each.copy_(copy)

        return put_back


class DecodedRows(NamedTuple):
    """What the network needs to know of a wave to run the newest token of each row."""

    context_len_B1: Tensor  # int64
    slot_base: Tensor  # int64, 0-d, first BeamKV slot of the wave
    slot_stride: Tensor  # int64, 0-d, BeamKV slots of one level


class Noise(NamedTuple):
    """Which requests of a wave want a sample, and of which seed; the last entry is padding."""

    asks_B1: Tensor  # int64, 1 for who does
    seed_B1: Tensor  # int64


def fixed_of(value: Any) -> Hashable:
    """All of an argument that a graph depends on: numbers, and where tensors lie and how large they are."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape
    if isinstance(value, tuple):
        return tuple([fixed_of(part) for part in value])
    return value.fixed if isinstance(value, Brought) else value


class Brought:
    """What a wave brings to the device."""

    @cached_property
    def fixed(self) -> Hashable:
        """What is fixed of all its fields, for those who ask more than once."""
        return fixed_of(tuple(vars(self).values()))


@dataclass
class PackedPrompts(Brought):
    """The packed prompts of a group (see search.py), on the device."""

    tokens_T: Tensor  # int64, those that are not cached
    first_B1: Tensor  # int64, row where those of each request begin, and at B where all end
    cached_B: Tensor  # int64, tokens before them whose keys and values are there already
    length_B: Tensor  # int64, tokens of each context, cached ones included; 0 for requests that are not there
    row_B: Tensor  # int64, row of BeamState that its hidden state goes to; a spare one for requests that are not there
    pages_BN: Tensor  # int32, pages of each request's context, N of the longest that there can be: always one width
    num_requests: Tensor  # int64, 0-d, of the whole wave

    def rows(self, page_size: int) -> tuple[Tensor, Tensor]:
        """Position and slot of ContextKV of each row's token [T], 0 where a row only fills the shape."""
        row_T = torch.arange(len(self.tokens_T), device=self.tokens_T.device)
        request_T = (row_T[:, None] >= self.first_B1[1:-1]).sum(1)
        real_T = row_T < self.first_B1[-1]
        position_T = torch.where(real_T, row_T - self.first_B1[request_T] + self.cached_B[request_T], 0)
        return position_T, torch.where(real_T, self._slots(request_T, position_T, page_size), 0)

    def last(self, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row, position and slot of each request's last token [B]; the latter 0 where there is no request."""
        position_B = (self.length_B - 1).clamp_min(0)
        request_B = torch.arange(len(position_B), device=position_B.device)
        return self.first_B1[1:] - 1, position_B, self._slots(request_B, position_B, page_size)

    def _slots(self, request_X: Tensor, position_X: Tensor, page_size: int) -> Tensor:
        page_X = self.pages_BN[request_X, position_X // page_size].long()
        return page_X * page_size + position_X % page_size


@dataclass
class WaveData(Brought):
    """What differs between waves of one shape, on the device. Last entries of the B1 arrays are padding."""

    rows: DecodedRows
    levels_B1: Tensor  # int64, how many tokens each request generates
    finished_B1: Tensor  # int64, finished sequences kept for each request
    join_B1: Tensor  # int64, candidates that are considered jointly = join * width (SGLang: 2; greedy: 1)
    widths_LB1: Tensor  # int64, beam width at each level; 0 past a request's last
    length_penalty_B1: Tensor  # float64
    stop_BV: Tensor | None  # bool [B + 1, V]
    special_S: Tensor | None  # int64, the tokenizer's special tokens, if anybody wants none of them
    suppressed_B1: Tensor  # int64, 1 for who does
    pruning: Pruning | None  # beams that policies give up, if any request has such a policy
    cap_B1: Tensor | None  # int64, most beams behind one first token, if any request has such a policy
    noise: Noise | None  # if any request wants a sample
    masks: Masks | None  # items that requests allow, if any of them does not allow all
