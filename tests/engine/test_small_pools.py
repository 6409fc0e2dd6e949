"""Warm-up on a device inside pools as small as they may be, and the waves that measure the work space before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.engine.warm_waves import make_large, make_runtime, make_search
from widebeam.constraints.catalog import Catalog
from widebeam.engine.job import Job
from widebeam.engine.leases import acquire
from widebeam.engine.pool_sizes import least_sizes
from widebeam.kv.prefix import Prefix
from widebeam.model.attention import Plans
from widebeam.model.reference import TorchBackend
from widebeam.model.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
LONGEST = 300
SMALL: dict[str, Any] = {"max_beam_width": 30, "max_wave_rows": 100, "max_wave_tokens": 256, "max_total_tokens": 2048}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_wave_rows": 16, "max_beam_width": 16},
        {"max_beam_width": 100},
        {"max_beam_width": 5, "max_wave_requests": 7},
        {"max_wave_requests": 1, "max_beam_width": 64, "max_wave_rows": 64},
        {"max_wave_requests": 40, "max_total_tokens": 4096},
        {"beam_kv_tokens": 32},
        {"beam_kv_tokens": 96},
        {"page_size": 8, "max_total_tokens": 256},
        {"page_size": 1, "max_total_tokens": 40},
        {"page_size": 64, "max_total_tokens": 64},
        {"page_size": 256, "max_total_tokens": 256},
        {"beam_kv_tokens": 16},
        {"max_wave_tokens": 10},
        {"max_levels": 1},
        {"beam_kv_tokens": 46},
        {"beam_kv_tokens": 70},
        {"max_total_tokens": None},
        {"max_total_tokens": 1024},
        {"max_wave_rows": 8, "max_beam_width": 8},
        {"max_beam_width": 2, "max_wave_requests": 64, "max_total_tokens": 8192},
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", ["on", "off"])
def test_small_pools(
    checkpoint: Path, catalog_file: Path, uncompiled: None, fields: dict[str, Any], cache: str
) -> None:
    """Every wave of the warm-up runs and gives back what it held."""
    runtime = make_runtime(checkpoint, prefix_cache=cache, **(SMALL | fields))
    runtime.check_integrity()
    runtime.add_catalog(Catalog.load(catalog_file, token_id=Tokenizer(checkpoint).token_id))
    runtime.check_integrity()
    ran = runtime.core.context.high_water > 0 and runtime.core.beams.high_water > 0
    assert ran == (fields.get("beam_kv_tokens") != 16)  # which no wave of three levels fits


@pytest.mark.parametrize("width", [1, 64])
def test_a_tiny_vocabulary(tmp_path: Path, uncompiled: None, width: int) -> None:
    """Fewer tokens than beams and rows."""
    checkpoint = tiny.save_checkpoint(tmp_path / "tiny", levels=1, codes=1)
    make_runtime(checkpoint, **(SMALL | {"max_beam_width": width})).check_integrity()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_beam_width": 100},
        {"max_beam_width": 25, "max_wave_requests": 2},
        {"max_beam_width": 40},
        {"beam_kv_tokens": 70},
        {"max_wave_tokens": 5000},
        {"max_wave_tokens": 5000, "page_size": 7},
    ],
    ids=str,
)
def test_the_waves_that_measure_the_work_space_fit(
    checkpoint: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run on a GPU before the pools are made, on the least ones; no prompt is longer than a context may be."""
    runtime = make_runtime(
        checkpoint, 512, **({"max_beam_width": 30, "max_wave_rows": 100, "max_wave_tokens": 512} | fields)
    )
    lengths: list[list[int]] = []
    monkeypatch.setattr("widebeam.engine.runtime.acquire", noting(lengths, acquire))
    runtime._run_largest_waves(least_sizes(runtime.config, 512))
    tokens = runtime.config.max_wave_tokens
    assert max(lengths[0]) <= 512 and tokens - len(lengths[0]) * runtime.config.page_size < sum(lengths[0]) <= tokens


@pytest.mark.parametrize("cache", ["on", "off"])
def test_no_plan_is_larger_than_those_of_the_waves_that_measure(
    checkpoint: Path, uncompiled: None, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention-2's room grows with rows and requests, and each plan keeps the one that it was made with."""
    sizes: list[tuple[int, int]] = []
    prefill_plan, context_plan = TorchBackend.prefill_plan, TorchBackend.context_plan

    def prefill(self: TorchBackend, requests: int, rows: int | None) -> Any:
        sizes.append((rows or 0, requests))
        return prefill_plan(self, requests, rows)

    def context(self: TorchBackend, requests: int, rows: int, splits: int, beside: bool) -> Any:
        sizes.append((splits * rows, requests))
        return context_plan(self, requests, rows, splits, beside)

    monkeypatch.setattr(TorchBackend, "prefill_plan", prefill)
    monkeypatch.setattr(TorchBackend, "context_plan", context)
    make_large(monkeypatch, 256, 480)
    settings = SMALL | {"max_wave_tokens": 1000, "max_total_tokens": 8192, "max_wave_requests": 70}
    runtime = make_runtime(checkpoint, LONGEST, prefix_cache=cache, page_size=8, **settings)
    while runtime.capture_more():
        pass
    for _ in range(2):
        searches = [make_search(np.arange(14) * (b + 1) % 50, 1) for b in range(70)]
        for search in searches:
            search.prefix = Prefix.of(search.token_ids, 8)
        runtime.run([Job(search, 0.0, None) for search in searches])
    later = sizes.copy()
    sizes.clear()
    monkeypatch.setattr(runtime, "_plans", Plans(runtime._plans._backend))
    runtime._run_largest_waves(least_sizes(runtime.config, LONGEST))
    assert len(later) > 10
    assert not [size for size in later if not any(all(np.less_equal(size, most)) for most in sizes)]


def noting(lengths: list[list[int]], acquire: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """`acquire` that keeps how long the prompts of a wave are."""

    def note(core: Any, wave: Any) -> None:
        lengths.append([search.num_tokens for search in wave.searches])
        acquire(core, wave)

    return note


@pytest.mark.gpu
def test_a_gpu_starts_with_contexts_much_shorter_than_waves(tmp_path: Path) -> None:
    checkpoint = tiny.save_checkpoint(tmp_path / "m", head_dim=64)
    runtime = make_runtime(
        checkpoint, 300, device="cuda", dtype="bfloat16", enforce_eager=True, max_total_tokens=32_768
    )
    (outcome,) = runtime.run([Job(make_search(np.arange(290) % 50, 8, 8), 0.0, None)])
    assert len(outcome.result.sequences) == 8  # type: ignore[union-attr]
