"""`widebeam check`: what this machine can run, and why not more."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil


def check() -> str:
    """A line for each thing that a fast engine needs: what is there, or what is missing and what that costs."""
    rows = [("python", platform.python_version()), *_torch(), *_flashinfer(), *_compiler()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _torch() -> list[tuple[str, str]]:
    import torch

    rows = [("torch", torch.__version__), ("cpu", f"yes, {torch.get_num_threads()} threads, float32 and bfloat16")]
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            "this torch is built without CUDA" if built is None else "torch sees no CUDA device (driver or permission)"
        )
        return [*rows, ("cuda", f"no: {why}; searches run on the CPU")]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        dtypes = "bfloat16, float16, float32" if device.major >= 8 else "float16, float32 (bfloat16 needs Ampere)"
        memory = device.total_memory / 2**30
        rows.append((f"cuda:{index}", f"{device.name}, sm_{device.major}{device.minor}, {memory:.0f} GiB, {dtypes}"))
    return rows


def _flashinfer() -> list[tuple[str, str]]:
    if importlib.util.find_spec("flashinfer") is None:
        return [("flashinfer", "no: not installed (pip install 'widebeam[cuda]'); attention runs in plain PyTorch")]
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
