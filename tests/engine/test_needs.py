"""What a start says where a GPU has too little memory: how much is missing, and which settings help. The GPU is made
up; nothing is allocated."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.warm_waves import make_runtime
from widebeam.config import EngineConfig
from widebeam.engine import runtime, startup
from widebeam.engine.memory import measured_sizes
from widebeam.engine.needs import GIB, Needs
from widebeam.engine.pool_sizes import PoolSizes
from widebeam.errors import ConfigError
from widebeam.model.weights import weight_bytes
from widebeam.plan.shapes import SHAPES

MODEL, CUDA = SHAPES["qwen3-1.7b"], torch.device("cuda", 0)
WEIGHTS = weight_bytes(MODEL, torch.bfloat16)
ROOMS = GIB + GIB // 4
BEAMS = 4 * 8192 * MODEL.kv_elements_per_token * 2
CONTEXT = 320 * 64 * MODEL.kv_elements_per_token * 2
"""The least that holds --max-wave-tokens."""
KNOWN = WEIGHTS + ROOMS + BEAMS + CONTEXT


@dataclass
class Gpu:
    """Its memory in bytes: of all, of other processes, and of this one as torch counts it."""

    total: int = 24 * GIB
    others: int = 0
    reserved: int = 0
    allocated: int = 0
    peak: int = 0
    capability: tuple[int, int] = (9, 0)

    def mem_get_info(self, _: Any) -> tuple[int, int]:
        return self.total - self.others - self.reserved, self.total


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    functions: dict[str, Callable[..., Any]] = {
        "mem_get_info": made.mem_get_info,
        "memory_reserved": lambda _: made.reserved,
        "memory_allocated": lambda _: made.allocated,
        "max_memory_allocated": lambda _: made.peak,
        "reset_peak_memory_stats": lambda _: None,
        "empty_cache": lambda: None,
        "get_device_capability": lambda _: made.capability,
        "get_device_properties": lambda _: type("Properties", (), {"total_memory": made.total}),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr("widebeam.model.flashinfer.why_not", lambda *_: None)
    return made


def needs(context: int = 5000, **settings: Any) -> Needs:
    return Needs(
        EngineConfig(model="x", **settings), MODEL, context, CUDA, torch.bfloat16, torch.bfloat16,
        fp8=settings.get("quantization") == "fp8",
    )  # fmt: skip


def refused(call: Callable[[], object]) -> tuple[float, str]:
    """The GiB that are missing, and the whole message."""
    with pytest.raises(ConfigError) as raised:
        call()
    found = re.search(r"([\d.]+) GiB of memory are missing", str(raised.value))
    assert found is not None
    return float(found[1]), str(raised.value)


def ran_out(tried: str = "2.00 GiB") -> torch.OutOfMemoryError:
    """As torch words it."""
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of ..")


def missing(total: int, gpu: Gpu, share: float = 0.9) -> Any:
    return pytest.approx((total - int(gpu.total * share) + gpu.others) / GIB, abs=0.006)


def test_what_is_known_is_refused_before_anything_is_read(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even before the attention backend is made, which takes minutes."""
    gpu.total, gpu.others = 12 * GIB, 2 * GIB
    monkeypatch.setattr(startup, "choose_device", lambda *_: CUDA)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(startup, "spare_cublas_workspace", lambda _: None)
    monkeypatch.setattr(startup, "make_backend", lambda *_: pytest.fail("a backend is made"))
    config = EngineConfig(model="x", dtype="bfloat16")
    short, message = refused(lambda: startup.choose_ground(config, MODEL, 5000, 0))
    assert short == missing(KNOWN, gpu)
    assert message == (
        f"at least {short:.2f} GiB of memory are missing on cuda:0: a start takes weights {WEIGHTS / GIB:.2f}, "
        f"catalogs and filters 1.25, beams' KV {BEAMS / GIB:.2f}, context KV {CONTEXT / GIB:.2f} or more, and of "
        f"12.00 GiB 2.00 are in use already and --gpu-memory-utilization 0.9 leaves 8.80. What helps: raise "
        f"--gpu-memory-utilization; lower --catalog-memory-gib, --filter-memory-gib, --max-wave-rows, "
        f"--beam-kv-tokens, --max-wave-tokens; choose --quantization fp8, --kv-cache-dtype fp8, another --device, "
        f"or a larger --tensor-parallel-size"
    )


def test_what_fits_is_not(gpu: Gpu) -> None:
    assert needs().require() == int(gpu.total * 0.9) - KNOWN
    gpu.others = gpu.total
    assert Needs(EngineConfig(model="x"), MODEL, 9, torch.device("cpu"), *[torch.float32] * 2, fp8=False).require() == 0


def test_only_what_can_make_up_for_it_is_named(gpu: Gpu) -> None:
    gpu.total = 2 * GIB
    _, message = refused(lambda: needs(gpu_memory_utilization=1.0).require())
    assert message.endswith(
        "What helps: choose --quantization fp8, another --device, or a larger --tensor-parallel-size"
    )
    gpu.total = 10 * GIB
    assert "lower --catalog-memory-gib" in refused(lambda: needs(gpu_memory_utilization=0.8).require())[1]


@pytest.mark.parametrize(
    ("settings", "context", "capability", "named", "unnamed"),
    [
        ({"quantization": "fp8"}, 5000, (9, 0), ["--kv-cache-dtype fp8"], ["--quantization"]),
        ({}, 5000, (8, 0), ["--max-wave-tokens"], ["fp8"]),
        ({}, 40_000, (9, 0), ["--max-context-len"], ["--max-wave-tokens", "--max-total-tokens"]),
        ({"max_total_tokens": 30_000}, 5000, (9, 0), ["--max-total-tokens"], ["--max-wave-tokens"]),
        ({"beam_kv_tokens": 40_000}, 5000, (9, 0), ["--beam-kv-tokens"], ["--max-wave-rows"]),
    ],
)  # fmt: skip
def test_settings_are_named_where_they_help(
    settings: dict[str, Any], context: int, capability: tuple[int, int], named: list[str], unnamed: list[str], gpu: Gpu
) -> None:
    gpu.total, gpu.capability = 8 * GIB, capability
    _, message = refused(lambda: needs(context, **settings).require())
    assert all(flag in message for flag in named) and not any(flag in message for flag in unnamed)


@pytest.mark.parametrize("graphs", [False, True])
def test_the_largest_waves_show_exactly_what_is_missing(gpu: Gpu, graphs: bool) -> None:
    """Beside the weights and rooms there are 100 MiB of other buffers; memory of another engine is not this one's."""
    gpu.allocated = gpu.reserved = GIB
    ours, work = needs(enforce_eager=not graphs), 9 * GIB
    base = GIB + WEIGHTS + ROOMS + (100 << 20)
    gpu.allocated = gpu.reserved = base

    def largest_waves(least: PoolSizes) -> None:
        assert least == PoolSizes(320, 4 * 8192)
        gpu.peak = base + BEAMS + CONTEXT + work

    total = KNOWN + (100 << 20) + work * (2 if graphs else 1)
    gpu.total = int((total + GIB + 50 * ours.page_bytes) / 0.9) + 2
    assert measured_sizes(ours, largest_waves, graphs) == PoolSizes(370, 4 * 8192)
    ours.context_pages, gpu.total = None, int((total - GIB) / 0.9)
    short, message = refused(lambda: measured_sizes(ours, largest_waves, graphs))
    assert short == pytest.approx(2.0, abs=0.006)
    assert message.startswith("2.00 GiB of memory are missing on cuda:0") and "or more" not in message
    assert f"work space {(total - KNOWN) / GIB:.2f}, and of" in message
    assert "lower --catalog-memory-gib, --filter-memory-gib, --max-wave-rows, --beam-kv-tokens, --max-wave" in message
    assert "--max-beam-width, --max-context-len" in message and ("--enforce-eager" in message) == graphs


def test_the_largest_waves_run_out_of_memory(gpu: Gpu) -> None:
    ours = needs()

    def largest_waves(_: PoolSizes) -> None:
        gpu.allocated = gpu.reserved = 23 * GIB
        raise ran_out()

    def start() -> None:
        with ours.explained():
            measured_sizes(ours, largest_waves, graphs=True)

    short, message = refused(start)
    assert short == missing(25 * GIB, gpu) and message.startswith("at least ")
    assert f"work space {25 - KNOWN / GIB:.2f} or more" in message and "raise --gpu-memory-utilization" in message
    assert "lower --max-wave-tokens" not in message and "--max-wave-tokens, --max-beam-width" in message


def test_behind_the_pools_a_smaller_share_leaves_more_work_space(gpu: Gpu) -> None:
    ours = needs()
    ours.context_pages, gpu.allocated, gpu.reserved = 1500, 22 * GIB, 24 * GIB - (1 << 20)
    message = ours.why(ran_out("512.00 MiB"))
    assert "raise" not in message and "lower --catalog-memory-gib" in message
    assert "--gpu-memory-utilization, --max-wave-tokens" in message
    assert f"context KV {1500 * ours.page_bytes / GIB:.2f}" in message
    ours.config = needs(max_total_tokens=96_000).config
    assert "--max-total-tokens, --max-wave-tokens" in ours.why(ran_out("512.00 MiB"))


def test_where_others_leave_nothing(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what CUDA itself takes."""

    def full(_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    ours = needs()
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    short, message = refused(ours.require)
    assert short == pytest.approx((KNOWN + 0.1 * gpu.total) / GIB, abs=0.01)
    assert "of 24.00 GiB 24.00 are in use already" in message and "leaves 0.00" in message

    def broken(_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    with pytest.raises(torch.AcceleratorError):
        ours.require()


@pytest.mark.parametrize("step", ["load_model", "make_rooms", "BeamState", "Prefixes"])
def test_every_step_of_a_start_says_so(checkpoint: Path, step: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs out of memory; an error of another kind, or of a CPU, stays what it is."""
    chosen = startup.choose_ground
    errors: list[Exception] = [ran_out("24.00 GiB"), RuntimeError("Triton Error [CUDA]: out of memory")]

    def fail(*_: Any, **__: Any) -> None:
        raise errors[0]

    monkeypatch.setattr(runtime, step, fail)
    with pytest.raises(torch.OutOfMemoryError):
        make_runtime(checkpoint)

    def pretended(*arguments: Any) -> Any:
        ground = chosen(*arguments)
        return ground._replace(needs=replace(ground.needs, device=CUDA))

    monkeypatch.setattr(runtime, "choose_ground", pretended)
    short, message = refused(lambda: make_runtime(checkpoint))
    assert short >= 2.4 and message.startswith("at least")
    errors.pop(0)
    refused(lambda: make_runtime(checkpoint))
    errors[0] = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        make_runtime(checkpoint)
