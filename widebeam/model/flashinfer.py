"""The attention ops by FlashInfer: FlashAttention-3 on Hopper, FlashAttention-2 elsewhere.

Prefill attends over the K and V just computed (ragged), which is a quarter faster than reading them back through pages.
Context attention reads the pages of a request once for all its beams. Every plan has fixed buffers, so that a captured
graph replays it: planning refills them in stream order, before the level that uses them.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from widebeam.model.config import ModelConfig
from widebeam.model.planning import DeviceArrays, Planner
from widebeam.model.work_lists import ListPlanner

log = logging.getLogger(__name__)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES, INT_WORKSPACE_BYTES = 256 << 20, 8 << 20
FA2_TILE = 128
"""Most rows of a tile, with all query heads that share a key head."""
STAGES = 8
"""Pinned buffers that planning writes in turn: the copy out of one may still wait behind a running prefill."""


def why_not(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """What keeps FlashInfer from running this model here, or None."""
    if device.type != "cuda":
        return "FlashInfer needs a CUDA device"
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (the extra `cuda`)"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "FlashInfer is used from Ampere (sm_80) on"
    if dtype not in DTYPES:
        return f"FlashInfer has no {str(dtype).removeprefix('torch.')} kernels"
    if config.head_dim not in HEAD_DIMS:
        return f"FlashInfer has no kernels for head size {config.head_dim}"
    return None


def _gist(error: Exception) -> str:
    """The first line of what may be a compiler's whole output."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


class FlashInferBackend:
    """Wrappers that share one workspace: they plan and run one after another on one stream. Plans that are used beside
    those of prefill have a second one. A context has `max_pages` at most.

    Pages of float8 are read by FlashAttention-2, with queries as they are: FlashAttention-3 would need float8 ones.

    Raises RuntimeError if none of FlashInfer's kernels can be built and run here.
    """

    name = "flashinfer"
    lse_scale = math.log(2)
    replayable = True

    def __init__(
        self,
        config: ModelConfig,
        page_size: int,
        max_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.page_size, self.max_pages, self.dtype, self.device = page_size, max_pages, dtype, device
        self.kv_dtype = kv_dtype or dtype
        self.workspace, self.int_workspace, self.int_workspace_beside = (
            torch.empty(size, dtype=torch.uint8, device=device)
            for size in (WORKSPACE_BYTES, INT_WORKSPACE_BYTES, INT_WORKSPACE_BYTES)
        )
        self._stages: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = itertools.count()
        started = time.perf_counter()
        kernels = ["fa3", "fa2"] if torch.cuda.get_device_capability(device)[0] == 9 else ["fa2"]
        self.fallbacks = 0
        for self.kernel in kernels:
            try:
                self._try()
                seconds = time.perf_counter() - started  # with those that failed before
                log.info("FlashInfer's %s kernels are there after %.1f s", self.kernel, seconds)
                return
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.fallbacks += 1
                log.warning("FlashInfer's %s kernels do not build or run here: %s", self.kernel, _gist(error))
        raise RuntimeError(f"none of FlashInfer's kernels ({', '.join(kernels)}) builds and runs here")

    def _try(self) -> None:
        """Build what every wave needs, and run it once. Building takes minutes where nothing is cached."""
        Q, K, D = self.heads
        rows = [torch.zeros(2, heads, D, dtype=self.dtype, device=self.device) for heads in (Q, K, K)]
        prefill, context = self.prefill_plan(1, 2), self.context_plan(1, 2, 1, beside=False)
        for _ in range(2):  # the second is made in another way
            prefill.plan([2], 2)
        prefill.run(*rows)
        for _ in range(2):
            context.plan([2], [1], [[0]])
        pool = torch.zeros(self.page_size, K, D, dtype=self.kv_dtype, device=self.device)
        context.run(rows[0], pool, pool, 1.0)
        torch.cuda.synchronize(self.device)

    @property
    def context_kernel(self) -> str:
        """What reads pages."""
        return self.kernel if self.kv_dtype == self.dtype else "fa2"

    def room(self, kernel: str, rows: int, requests: int) -> Tensor:
        """The workspace, made larger if these rows need it: in a plan that graphs replay, FlashAttention-2 keeps a
        float32 output of each tile, and its log-sum-exp."""
        Q, K, D = self.heads
        if kernel == "fa2":
            waves = 2 * torch.cuda.get_device_properties(self.device).multi_processor_count // K
            tiles = max(waves, -(-rows * (Q // K) // FA2_TILE) + requests) + 1
            size = Q * tiles * FA2_TILE * (D + 1) * 4
            if size > self.workspace.numel():
                self.workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self.workspace

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        """In which planning and all that follows it lie."""
        return torch.cuda.current_stream(self.device)

    def prefill_plan(self, requests: int, rows: int | None) -> FlashInferPrefill:
        return FlashInferPrefill(self, requests, rows)

    def context_plan(self, requests: int, rows: int, splits: int, beside: bool) -> FlashInferContext:
        return FlashInferContext(self, requests, rows, splits, beside)

    def planner(
        self, wrapper: Any, arrays: DeviceArrays, kernel: str, *, causal: bool, beside: bool = False
    ) -> Planner | ListPlanner:
        """What plans a wrapper for graphs again."""
        if kernel != "fa3":
            return Planner(wrapper, arrays, functools.partial(self.staged, wrapper, beside))
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        return ListPlanner(wrapper, arrays, self.heads[0], self.heads[2], causal=causal, processors=processors)

    @contextmanager
    def staged(self, wrapper: Any, beside: bool = False) -> Iterator[None]:
        """Within it the wrapper has a pinned buffer that no copy reads any more, for a compiled planner to fill."""
        if len(self._stages) < STAGES:
            buffer = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True)
            self._stages.append((buffer, torch.cuda.Event()))
            buffer, event = self._stages[-1]
        else:
            buffer, event = self._stages[next(self._turn) % STAGES]
            event.synchronize()
        wrapper._pin_memory_int_workspace_buffer = buffer
        wrapper._int_workspace_buffer = self.int_workspace_beside if beside else self.int_workspace
        yield
        event.record(self.stream)


class FlashInferPrefill:
    """PrefillPlan: ragged, causal. Rows behind the last prompt are one more prompt of their own."""

    def __init__(self, backend: FlashInferBackend, requests: int, rows: int | None) -> None:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        self._backend, self._requests = backend, requests
        room = backend.room(backend.kernel, rows or 0, requests + 1)
        arrays = DeviceArrays([requests + 2, requests + 2, requests + 1], backend.device)
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(
            room, "NHD", use_cuda_graph=rows is not None, qo_indptr_buf=arrays.views[0], kv_indptr_buf=arrays.views[1],
            backend=backend.kernel,
        )  # fmt: skip
        graphed = rows is not None
        self._planner = backend.planner(self._wrapper, arrays, backend.kernel, causal=True) if graphed else None

    def plan(self, lengths: Sequence[int], num_rows: int) -> None:
        backend = self._backend
        sizes = np.array([*lengths, *[0] * (self._requests - len(lengths)), num_rows - sum(lengths)], dtype=np.int32)
        begins = np.concatenate(([0], sizes)).cumsum(dtype=np.int32)

        def first() -> None:
            indptr = torch.from_numpy(begins)
            with backend.staged(self._wrapper):
                self._wrapper.plan(
                    indptr, indptr, *backend.heads, causal=True, q_data_type=backend.dtype, kv_data_type=backend.dtype
                )

        if self._planner is None:
            first()
        else:
            self._planner.plan(first, begins, begins, sizes)

    def run(self, q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        return self._wrapper.run(q_TQD, k_TKD, v_TKD, out=torch.empty_like(q_TQD), return_lse=True)


class FlashInferContext:
    """ContextPlan: paged, not causal, each context cut in `splits` parts that see all rows of their request.

    One request at width 256 cannot fill the chip; its parts are pseudo-requests with copies of the same queries, which
    `ops.merge_beams` puts together. In each part the rows that only fill the shape are a request of their own, over the
    one token of page 0, so that every row is written.
    """

    def __init__(self, backend: FlashInferBackend, requests: int, rows: int, splits: int, beside: bool) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._backend, self._requests, self._rows, self._splits = backend, requests, rows, splits
        self._beside = beside
        batch = splits * (requests + 1)
        room = backend.room(backend.context_kernel, splits * rows, batch)
        sizes = [batch + 1, batch + 1, batch, batch, requests * backend.max_pages + batch]
        arrays = DeviceArrays(sizes, backend.device)
        queries, keys, _, last, indices = arrays.views
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            room, "NHD", use_cuda_graph=True, qo_indptr_buf=queries, paged_kv_indptr_buf=keys,
            paged_kv_indices_buf=indices, paged_kv_last_page_len_buf=last, backend=backend.context_kernel,
        )  # fmt: skip
        self._planner = backend.planner(self._wrapper, arrays, backend.context_kernel, causal=False, beside=beside)

    def plan(self, widths: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        backend = self._backend
        rows, tables, last = self._parts(widths, lengths, pages)
        counts, last_P = np.array([*map(len, tables)], dtype=np.int32), np.array(last, dtype=np.int32)
        queries = np.array([0, *rows]).cumsum(dtype=np.int32)
        keys = np.concatenate(([0], counts)).cumsum(dtype=np.int32)
        indices = np.array([*itertools.chain.from_iterable(tables)], dtype=np.int32)

        def first() -> None:
            arrays = torch.from_numpy(queries), torch.from_numpy(keys), torch.from_numpy(indices).to(backend.device)
            with backend.staged(self._wrapper, self._beside):
                self._wrapper.plan(
                    *arrays, torch.from_numpy(last_P), *backend.heads, backend.page_size, causal=False,
                    q_data_type=backend.dtype, kv_data_type=backend.kv_dtype,
                )  # fmt: skip

        tokens = np.maximum(counts - 1, 0) * backend.page_size + last_P
        self._planner.plan(first, queries, keys, tokens, last_P, indices)

    def _parts(
        self, widths: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[Sequence[int]], list[int]]:
        """Rows, pages and tokens on the last page of each pseudo-request, part by part."""
        S = self._backend.page_size
        absent = self._requests - len(widths)
        rows, tables, last = [], [], []
        for part in range(self._splits):
            for width, length, table in zip(widths, lengths, pages, strict=True):
                first, end = (len(table) * (part + i) // self._splits for i in (0, 1))
                rows.append(width)
                tables.append(table[first:end])
                last.append(min(length - (end - 1) * S, S))
            rows += [0] * absent + [self._rows - sum(widths)]
            tables += [[0]] * (absent + 1)
            last += [1] * (absent + 1)
        return rows, tables, last

    def run(self, q: Tensor, k_SKD: Tensor, v_SKD: Tensor, k_scale: float) -> tuple[Tensor, Tensor]:
        pages = tuple(pool.unflatten(0, (-1, self._backend.page_size)) for pool in (k_SKD, v_SKD))
        out = torch.empty_like(q)  # else it fills zeros first
        return self._wrapper.run(q, pages, k_scale=k_scale, out=out, return_lse=True)
