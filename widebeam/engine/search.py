"""The whole search, top to bottom: prefill the prompts, take one level after another, bring the results home.

Runs on the GPU thread only. Between `prefill` and `collect` nothing is read back from the device, except one flag
after every PIECE levels of a long search.

Letters: T packed prompt tokens, B requests, R rows, F finished sequences, L levels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from widebeam.constraints.trie import DeviceTrie
from widebeam.engine.request import Sequence
from widebeam.engine.staging import to_device, to_host
from widebeam.engine.state import REASONS, WaveData
from widebeam.engine.step import Core, advance
from widebeam.engine.wave import Search, Wave
from widebeam.errors import EngineError
from widebeam.model.attention import prefill_attention
from widebeam.model.qwen3 import Attend

PIECE = 8
"""Levels that are launched without a look at whether anybody still needs them."""


@dataclass
class WaveResult:
    """What a wave gave: for each search its sequences, best first, or why it failed."""

    outcomes: list[list[Sequence] | EngineError]
    prefill_ms: float
    decode_ms: float


class Clock:
    """Moments on the device's own time line, readable once the device has passed them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def elapsed_ms(self, first: int, last: int) -> float:
        start, end = self._marks[first], self._marks[last]
        if isinstance(start, float) or isinstance(end, float):
            return (end - start) * 1e3  # type: ignore[operator]
        return start.elapsed_time(end)


@torch.inference_mode()
def run_wave(core: Core, wave: Wave, trie: DeviceTrie | None, wanted: Callable[[], bool]) -> WaveResult:
    """Search all requests of a wave. `wanted` is asked between pieces whether any of them still has a taker."""
    device = core.state.level.device
    clock = Clock(device)
    clock.mark()
    staged = to_device(wave.arrays() | prompt_arrays(core, wave), device)
    data = wave_data(wave, staged, core.model.config.vocab_size)
    core.state.start(data.num_requests, wave.requests)
    hidden_BH = prefill(core, wave, staged)
    advance(core, data, trie, wave.shapes[0], 0, hidden_BH)
    clock.mark()
    planned: tuple[int, list[int]] | None = None
    for level in range(1, wave.num_levels):
        live_R = core.state.cum_R[: wave.shapes[level].rows_in] > -torch.inf
        if level % PIECE == 0 and not (wanted() and bool(live_R.any())):
            break
        shape, rows = wave.shapes[level], wave.rows(level - 1)
        plan, handle = core.plans.context(shape.requests, shape.rows_in, shape.splits)
        if planned != (handle, rows):
            plan.plan(rows, *contexts(wave))
            planned = (handle, rows)
        core.programs.level_step(core, data, trie, shape, level, handle)
    clock.mark()
    outcomes = collect(core, wave)
    return WaveResult(outcomes, clock.elapsed_ms(0, 1), clock.elapsed_ms(1, 2))


def prompt_arrays(core: Core, wave: Wave) -> dict[str, np.ndarray]:
    """Packed prompts: token, position and place in ContextKV of each of T rows, and the last row of each request."""
    searches = wave.searches
    places = [core.context.places(search.lease) for search in searches if search.lease]
    lengths = [search.num_tokens for search in searches]
    last_B = np.zeros(wave.requests, dtype=np.int64)
    last_B[: len(searches)] = np.cumsum(lengths) - 1
    return {
        "tokens_T": np.concatenate([search.token_ids for search in searches]).astype(np.int64),
        "positions_T": np.concatenate([np.arange(length) for length in lengths]).astype(np.int64),
        "page_T": np.concatenate([pages for pages, _ in places]),
        "offset_T": np.concatenate([offsets for _, offsets in places]),
        "last_B": last_B,
        "stop_B": np.array([b for b, search in enumerate(searches) for _ in search.stop_token_ids], dtype=np.int64),
        "stop_token": np.array([token for search in searches for token in search.stop_token_ids], dtype=np.int64),
    }


def wave_data(wave: Wave, staged: dict[str, Tensor], vocab_size: int) -> WaveData:
    """The wave's device arrays; stop tokens become a table, so that looking one up costs no loop over them."""
    stop_BV = None
    if wave.has_stops:
        stop_BV = torch.zeros(wave.requests + 1, vocab_size, dtype=torch.bool, device=staged["stop_B"].device)
        stop_BV[staged["stop_B"], staged["stop_token"]] = True
    return WaveData(stop_BV=stop_BV, **{name: staged[name] for name in wave.arrays()})


def prefill(core: Core, wave: Wave, staged: dict[str, Tensor]) -> Tensor:
    """Run the packed prompts once, filling ContextKV: hidden state at each request's last token, [B, H]."""
    page_T, offset_T = staged["page_T"], staged["offset_T"]
    plan, handle = core.plans.prefill(wave.requests, None)
    plan.plan([search.num_tokens for search in wave.searches], len(page_T))

    def attend_with(k_pages: Tensor, v_pages: Tensor) -> Attend:
        """The attention of one layer, which also puts keys and values on their pages."""

        def attend(q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            k_pages[page_T, offset_T] = k_TKD
            v_pages[page_T, offset_T] = v_TKD
            return prefill_attention(q_TQD, k_TKD, v_TKD, handle)[0]

        return attend

    attends = [attend_with(*pages) for pages in zip(core.context.k, core.context.v, strict=True)]
    return core.model(
        staged["tokens_T"], staged["positions_T"], attends, staged["last_B"], run=core.programs.prefill_layer
    )


def contexts(wave: Wave) -> tuple[list[int], list[list[int]]]:
    """Length and pages of each request's context."""
    searches = wave.searches
    pages = [search.lease.pages if search.lease else [] for search in searches]
    return [search.num_tokens for search in searches], pages


def collect(core: Core, wave: Wave) -> list[list[Sequence] | EngineError]:
    """Follow the finished sequences' paths through the history and bring everything back in one copy."""
    state, L = core.state, wave.num_levels
    done = state.finished.head(wave.finished, L)
    path_LF = done.path.t().long()
    token_LF, logprob_LF = state.token_JR[:L].gather(1, path_LF), state.logprob_JR[:L].gather(1, path_LF)
    last_LF = torch.arange(L, device=path_LF.device)[:, None] == done.length - 1
    token_LF = torch.where(last_LF, done.token.int(), token_LF)
    logprob_LF = torch.where(last_LF, done.logprob, logprob_LF)
    integers = torch.stack((done.length, done.node, done.reason)).int()
    floats = torch.stack((done.score, done.cum))
    home = to_host([token_LF, logprob_LF, integers, floats, state.broken_B])
    return unpack(wave.searches, *home)


def unpack(
    searches: list[Search],
    token_LF: np.ndarray,
    logprob_LF: np.ndarray,
    integers: np.ndarray,
    floats: np.ndarray,
    broken_B: np.ndarray,
) -> list[list[Sequence] | EngineError]:
    """Host arrays -> sequences, for each search its own places; empty places (score -inf) are left out."""
    length_F, node_F, reason_F = integers
    score_F, cum_F = floats
    outcomes: list[list[Sequence] | EngineError] = []
    start = 0
    for b, search in enumerate(searches):
        places = range(start, start + search.num_returned)
        start += search.num_returned
        if broken_B[b]:
            outcomes.append(EngineError("the model's logits are not finite numbers", code="non_finite_logits"))
            continue
        outcomes.append(
            [
                Sequence(
                    token_ids=token_LF[: length_F[f], f].tolist(),
                    logprobs=logprob_LF[: length_F[f], f].tolist(),
                    cum_logprob=float(cum_F[f]),
                    score=float(score_F[f]),
                    finish_reason=REASONS[reason_F[f]],  # type: ignore[arg-type]
                    node=int(node_F[f]) if search.catalog is not None else -1,
                )
                for f in places
                if score_F[f] > -np.inf
            ]
        )
    return outcomes
