"""On two GPUs, compiled and captured with the collectives inside: the same results as on one."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.engine.test_compiled_gpu import EPS, LONGEST, WAVES, WIDE, assert_alike, large_heads, results
from tests.engine.warm_waves import make_runtime
from widebeam.config import EngineConfig
from widebeam.constraints.catalog import Catalog
from widebeam.engine.compile import made_so_far
from widebeam.engine.ranks import Ranks
from widebeam.engine.runtime import Runtime
from widebeam.engine.spawn import Followers
from widebeam.model.config import load_model_config

__all__ = ["large_heads"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_two_gpus_give_what_one_gives(large_heads: tuple[Path, Catalog]) -> None:
    """Run once, captured, and replayed, which must not change a bit."""
    checkpoint, catalog = large_heads
    alone = make_runtime(checkpoint, LONGEST, enforce_eager=True, **WIDE)
    alone.add_catalog(catalog)
    expected = {kind: results(alone, kind, catalog) for kind in WAVES}
    del alone
    gc.collect()
    settings = {"model": str(checkpoint), "max_levels": 16, "max_context_len": LONGEST, "warmup": "none", **WIDE}
    config = EngineConfig(**settings, tensor_parallel_size=2)
    ended: list[str] = []
    followers = Followers(config, checkpoint, ended.append)
    followers.start()
    try:
        ranks = Ranks(followers.place, config, cuda=True)
        runtime = Runtime(config, checkpoint, load_model_config(checkpoint), LONGEST, ranks)
        runtime.add_catalog(catalog)
        before = made_so_far(runtime.device)
        for kind in WAVES:
            runs = [results(runtime, kind, catalog) for _ in range(4)]
            for found in runs:
                assert_alike(expected[kind], found, EPS)
            assert runs[2] == runs[3], "a replay gave other numbers than the replay before"
        after = made_so_far(runtime.device)
        assert after.captured > before.captured and after.skipped == before.skipped
        assert runtime.fallbacks == 0
        runtime.check_integrity()
        runtime.close()
        assert not ended
    finally:
        followers.close()
