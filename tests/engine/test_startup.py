"""What a start chooses and loads: the attention backend that was asked for, or the fastest that runs here, and never
one in silence; and no compiler that nobody needs."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.model.test_attention import CONFIG
from widebeam.config import EngineConfig
from widebeam.engine import startup
from widebeam.engine.startup import make_backend
from widebeam.errors import ConfigError
from widebeam.model.attention import BACKENDS
from widebeam.model.reference import TorchBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NO_COMPILER = "none of FlashInfer's kernels (fa3, fa2) builds and runs here"


def make(name: str, device: torch.device) -> tuple[Any, int]:
    return make_backend(EngineConfig(model="x", attention_backend=name), CONFIG, 8, torch.bfloat16, device)


@pytest.fixture(autouse=True)
def flashinfer_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as can be told without trying."""
    monkeypatch.setattr(startup, "why_not", lambda *_: None)


def flashinfer_is(factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS._targets, "flashinfer", factory)


def raising(error: BaseException) -> Any:
    def factory(*_: Any) -> None:
        raise error

    return factory


def test_auto_takes_the_next_one_where_kernels_do_not_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flashinfer_is(raising(RuntimeError(NO_COMPILER)), monkeypatch)
    with caplog.at_level(logging.WARNING, "widebeam"):
        backend, fallbacks = make("auto", CUDA)
    assert isinstance(backend, TorchBackend) and fallbacks == 1
    (record,) = caplog.records
    assert record.levelname == "WARNING" and NO_COMPILER in record.message and "slow" in record.message


def test_one_asked_for_by_name_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_is(raising(RuntimeError(NO_COMPILER)), monkeypatch)
    with pytest.raises(ConfigError) as raised:
        make("flashinfer", CUDA)
    assert str(raised.value) == f"--attention-backend flashinfer: {NO_COMPILER}"
    monkeypatch.setattr(startup, "why_not", lambda *_: "FlashInfer needs a CUDA device")
    with pytest.raises(ConfigError, match="--attention-backend flashinfer: FlashInfer needs a CUDA device"):
        make("flashinfer", CPU)


def test_auto_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is not tried. On a CPU nothing faster is missing, so nothing is said."""
    flashinfer_is(raising(AssertionError("tried")), monkeypatch)
    monkeypatch.setattr(startup, "why_not", lambda *_: "FlashInfer is not installed (the extra `cuda`)")
    backend, fallbacks = make("auto", CUDA)
    assert isinstance(backend, TorchBackend) and fallbacks == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not installed" in caplog.text
    caplog.clear()
    backend, fallbacks = make("auto", CPU)
    assert isinstance(backend, TorchBackend) and fallbacks == 0 and not caplog.records


def test_float8_pages_are_never_read_by_plain_pytorch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_is(raising(RuntimeError(NO_COMPILER)), monkeypatch)
    config = EngineConfig(model="x", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError) as raised:
        make_backend(config, CONFIG, 8, torch.bfloat16, CUDA, torch.float8_e4m3fn)
    assert str(raised.value) == f"--kv-cache-dtype fp8: {NO_COMPILER}"
    backend, _ = make_backend(config, CONFIG, 8, torch.bfloat16, CPU, torch.float8_e4m3fn)
    assert isinstance(backend, TorchBackend)


@pytest.mark.parametrize("name", ["auto", "flashinfer"])
@pytest.mark.parametrize("count", [0, 1])
def test_slower_kernels_of_the_same_backend_count(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(fallbacks=count)
    flashinfer_is(lambda *_: made, monkeypatch)
    assert make(name, CUDA) == (made, count)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_the_plain_one_by_name(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flashinfer_is(raising(AssertionError("tried")), monkeypatch)
    backend, fallbacks = make("torch", device)
    assert isinstance(backend, TorchBackend) and fallbacks == 0 and not caplog.records


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown attention backend 'flashinfr'.*did you mean 'flashinfer'\?"):
        make("flashinfr", CPU)
    with pytest.raises(ConfigError, match="known are flashinfer, torch"):
        make("", CUDA)


@pytest.mark.parametrize("name", ["auto", "flashinfer"])
def test_want_of_memory_is_no_reason_for_another_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_is(raising(torch.OutOfMemoryError("CUDA out of memory")), monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        make(name, CUDA)


SEARCH = """
import asyncio, sys
from widebeam import Engine, EngineConfig, SearchParams

async def search(model):
    async with Engine(EngineConfig(model=model, device="cpu", max_context_len=64)) as engine:
        return await engine.submit([5, 6, 7], SearchParams(n=2, beam_width=4, max_new_tokens=2))

assert len(asyncio.run(search(sys.argv[1])).sequences) == 2
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


def test_a_cpu_does_not_load_the_compiler(checkpoint: Path) -> None:
    """From start to result: it takes longer to load than all the rest of torch."""
    done = subprocess.run([sys.executable, "-c", SEARCH, str(checkpoint)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
