"""`widebeam check`: what this machine can run, and why not more."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from typing import TYPE_CHECKING

from widebeam.errors import how_to_install
from widebeam.faults import counted
from widebeam.model.config import ModelConfig, load_model_config
from widebeam.plan.shapes import SHAPES

if TYPE_CHECKING:
    import torch

TYPICAL = SHAPES["qwen3-1.7b"]
"""Stands for the model if none is named: what runs depends on few of its sizes."""


def check(model: str | None = None) -> str:
    """A line for each thing that a fast engine needs: what is there, or what is missing and what that costs.

    Then a line for each device and type that this model, or one like most, can run in. Raises CheckpointError.
    """
    rows = [("python", platform.python_version()), *_torch(), *_flashinfer(), *_compiler(), *_runs(model)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _torch() -> list[tuple[str, str]]:
    import torch

    rows = [("torch", torch.__version__), ("cpu", f"yes, {counted(torch.get_num_threads(), 'thread')}")]
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            "this torch is built without CUDA" if built is None else "torch sees no CUDA device (driver or permission)"
        )
        return [*rows, ("cuda", f"no: {why}; searches run on the CPU")]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = device.total_memory / 2**30
        rows.append((f"cuda:{index}", f"{device.name}, sm_{device.major}{device.minor}, {memory:.0f} GiB"))
    return rows


def _flashinfer() -> list[tuple[str, str]]:
    if importlib.util.find_spec("flashinfer") is None:
        install = how_to_install("cuda")
        return [("flashinfer", f"no: not installed ({install}); attention runs in plain PyTorch")]
    return [
        ("flashinfer", f"{_version('flashinfer-python')}; attention runs on it from Ampere on, in bfloat16 and float16")
    ]


def _version(distribution: str) -> str:
    """The version of a module that is there, under whatever name it was distributed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "is installed, of unknown version"


def _compiler() -> list[tuple[str, str]]:
    """What torch.compile needs: Triton for GPUs, a C++ compiler for CPUs."""
    rows = []
    if importlib.util.find_spec("triton") is None:
        rows.append(("triton", "no: not installed; GPU kernels cannot be compiled"))
    else:
        rows.append(("triton", _version("triton")))
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    rows.append(("c++", compiler or "no: torch.compile cannot build for the CPU; the engine does not need it"))
    return rows


def _runs(model: str | None) -> list[tuple[str, str]]:
    """The table of device x type: whether the model runs there, and with which attention."""
    import torch

    from widebeam.model.weights import resolve_checkpoint

    config = TYPICAL if model is None else load_model_config(resolve_checkpoint(model, files=("*.json",)))
    stored = "fp8" if config.quantization == "fp8" else config.dtype
    rows = [] if model is None else [("model", f"{model}: {config.model_type}, {stored}")]
    for name in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        device = torch.device(name)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            rows.append((f"{name} {str(dtype).removeprefix('torch.')}", _plain(config, dtype, device)))
        rows.append((f"{name} fp8", _fp8(config, device)))
        rows.append((f"{name} fp8 KV", _fp8_pages(config, device)))
    return rows


def _plain(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Whether the checkpoint as it is runs with this type of weights and KV."""
    import torch

    from widebeam.model import flashinfer, fp8

    if config.quantization == "fp8" and (reason := fp8.why_not(config, dtype, device)):
        return f"no: {reason}"
    if device.type == "cpu":
        return "yes"
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return "no: bfloat16 needs Ampere (sm_80) or later"
    if reason := flashinfer.why_not(config, dtype, device):
        return f"yes, but attention in plain PyTorch, which is slow: {reason}"
    return "yes, attention by FlashInfer"


def _fp8(config: ModelConfig, device: torch.device) -> str:
    """Whether the projections can be float8."""
    import torch

    from widebeam.model import fp8

    if device.type == "cpu":
        return "yes, with each of these, but slowly: float8 is widened for every product"
    reason = fp8.why_not(config, torch.bfloat16, device)
    return f"no: {reason}" if reason else "yes, with bfloat16 (--quantization fp8)"


def _fp8_pages(config: ModelConfig, device: torch.device) -> str:
    """Whether the context KV pool can be float8."""
    import torch

    from widebeam.model import fp8

    if device.type == "cpu":
        return "yes, with each of these, but slowly: float8 is widened whenever it is read"
    reason = fp8.why_no_pages(config, torch.bfloat16, device)
    return f"no: {reason}" if reason else "yes, with bfloat16 and float16 (--kv-cache-dtype fp8)"
