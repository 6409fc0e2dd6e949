"""Searches whose prompts went to the host's memory and came back: the same as on an engine that computes everything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_reuse import PAGE, assert_same, prompt, run, sharing
from tests.engine.warm_waves import make_runtime, make_search
from widebeam.engine.runtime import Runtime
from widebeam.errors import ConfigError
from widebeam.kv.host import HostTier

pytestmark = pytest.mark.usefixtures("one_thread")
HOST: dict[str, Any] = {"prefix_cache": "on", "page_size": PAGE, "max_total_tokens": 512, "prefix_cache_host_gib": 0.01}
SMALL = {"max_wave_tokens": 512, "max_wave_rows": 64, "max_beam_width": 16}


def tier_of(runtime: Runtime) -> HostTier:
    assert runtime.core.tier is not None
    return runtime.core.tier


def with_tier(checkpoint: Path, **fields: Any) -> Runtime:
    """Restores always pay."""
    runtime = make_runtime(checkpoint, **(HOST | SMALL | fields))
    tier_of(runtime)._copies.bytes_per_s = math.inf
    return runtime


def compare(checkpoint: Path, waves: int, **fields: Any) -> None:
    """Many more users than the device has room for, some of whom share a beginning, in two tenants."""
    warm = with_tier(checkpoint, check_host_pages=True, **fields)
    cold = make_runtime(checkpoint, page_size=PAGE, max_total_tokens=4096, **(SMALL | fields))
    rng, hits, cached = np.random.default_rng(3), 0, 0
    histories = [np.append(prompt(24, seed % 3), prompt(60, seed)).astype(np.int32) for seed in range(24)]
    for wave in range(waves):
        users = rng.choice(24, 3, replace=False)
        for user in users:
            histories[user] = np.append(histories[user], rng.integers(0, 50, 3))[:150].astype(np.int32)
        searches = [sharing(histories[user], salt=b"a" if user % 2 else b"b") for user in users]
        warm.prefixes.move_pages(searches)
        assert_same(run(warm, searches), run(cold, [make_search(histories[user], 6) for user in users]))
        hits += sum(search.num_cached > 24 for search in searches)
        cached += sum(search.num_cached for search in searches)
        if wave == waves // 2:
            warm.prefixes.flush(b"a")
    warm.prefixes.settle()
    warm.check_integrity()
    stats, prefix = warm.prefixes.host_stats, warm.prefixes.stats
    assert hits > waves and stats.restored > waves and stats.saved >= stats.pages > 64
    assert prefix.hit_tokens == cached and 0 < prefix.restored_tokens <= min(cached, stats.restored * PAGE)
    assert (stats.corrupt, stats.failed, stats.declined, stats.evicted) == (0, 0, 0, 0)
    assert (stats.bytes_to_host, stats.bytes_to_device) == tuple(
        count * stats.page_bytes for count in (stats.saved, stats.restored)
    )
    assert warm.core.context.page_bytes == stats.page_bytes and stats.prefill_tokens_per_s == 0
    warm.prefixes.flush()
    assert warm.prefixes.host_stats.pages == 0 == warm.core.context.pages_used


def test_more_users_than_fit(checkpoint: Path) -> None:
    compare(checkpoint, 40)


def test_float8_pages_come_back_as_they_were(checkpoint: Path) -> None:
    runtime = with_tier(checkpoint, kv_cache_dtype="fp8")
    history = prompt(100).astype(np.int32)
    run(runtime, [sharing(history)])
    on_device = run(runtime, [sharing(history)])
    for seed in range(1, 9):
        run(runtime, [sharing(prompt(100, seed).astype(np.int32))])
    again = sharing(history)
    runtime.prefixes.move_pages([again])
    assert runtime.prefixes.host_stats.restored > 0
    assert_same(run(runtime, [again]), on_device)
    assert again.num_cached == 96 and runtime.prefixes.host_stats.page_bytes == runtime.core.context.page_bytes


@pytest.mark.gpu
def test_more_users_than_fit_a_gpu(checkpoint: Path) -> None:
    """Pinned memory and streams."""
    compare(checkpoint, 200, device="cuda", attention_backend="torch", enforce_eager=True)


def test_a_wave_that_fails_saves_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = with_tier(checkpoint)

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="broken"):
        patched.setattr("widebeam.engine.search.selection", fail)
        run(runtime, [sharing(prompt(50))])
    runtime.prefixes.move_pages(())
    runtime.check_integrity()
    assert runtime.prefixes.host_stats.saved == 0 and not runtime.prefixes.moves_pages


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefix_cache": "off"}, "--prefix-cache on"),
        ({"prefix_cache_host_gib": 1e-9}, "for a page of --page-size 8 tokens"),
        ({"prefix_cache_host_gib": 1e6}, "all that the host has"),
    ],
)
def test_settings_that_make_no_sense(checkpoint: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="--prefix-cache-host-gib") as caught:
        make_runtime(checkpoint, **(HOST | fields))
    assert message in str(caught.value)


def test_memory_that_cannot_be_pinned_is_not_the_devices(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are told as `out of memory` by CUDA."""

    def refused(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nand more")

    monkeypatch.setattr("widebeam.engine.memory.PageCopies", refused)
    with pytest.raises(ConfigError, match=r"--prefix-cache-host-gib 0.01: .* CUDA error: out of memory$"):
        make_runtime(checkpoint, **HOST)
