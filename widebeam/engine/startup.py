"""What an engine runs on: device, dtype, attention backend. Decided once, before weights are read."""

from __future__ import annotations

import logging
import os
import warnings
from typing import NamedTuple

import torch

from widebeam.config import EngineConfig
from widebeam.engine.needs import Needs
from widebeam.errors import ConfigError
from widebeam.faults import counted
from widebeam.model.attention import BACKENDS, AttentionBackend
from widebeam.model.config import ModelConfig
from widebeam.model.flashinfer import why_not
from widebeam.model.fp8 import kv_dtype, wants_fp8
from widebeam.model.parallel import Shard

log = logging.getLogger(__name__)
LEAST_CAPABILITY = (7, 5)
"""What current builds of torch and Triton are made for."""
HOPPER = 9
"""Major compute capability."""


class Ground(NamedTuple):
    """What an engine runs on."""

    device: torch.device
    dtype: torch.dtype
    """Of weights, and of what is decoded."""
    kv_dtype: torch.dtype
    """Of context pages."""
    fp8: bool
    """Projections are float8."""
    backend: AttentionBackend
    fallbacks: int
    """Faster backends that do not run."""
    needs: Needs
    """Of the device's memory."""

    @property
    def info(self) -> dict[str, str]:
        """In words."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "backend": self.backend.name,
            "quantization": "fp8" if self.fp8 else "none",
        }


def choose_ground(config: EngineConfig, model: ModelConfig, max_context_len: int, rank: int) -> Ground:
    """By the settings, the model (a rank's part of it) and what this machine can do. Raises ConfigError."""
    device = choose_device(config.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        spare_cublas_workspace(device)
    dtype = choose_dtype(config.dtype, model.dtype, device)
    pages_dtype = kv_dtype(config.kv_cache_dtype, config.attention_backend, model, dtype, device)
    quantized = "fp8" in (config.quantization, model.quantization)
    needs = Needs(config, model, max_context_len, device, dtype, pages_dtype, quantized)
    max_pages = -(-max_context_len // config.page_size)
    with needs.explained():
        needs.require()
        fp8 = wants_fp8(config.quantization, model, dtype, device)
        backend, fallbacks = make_backend(config, model, max_pages, dtype, device, pages_dtype)
    return Ground(device, dtype, pages_dtype, fp8, backend, fallbacks, needs)


def choose_device(name: str, rank: int = 0) -> torch.device:
    """The device of that name; auto takes CUDA where there is one. Each rank has its own. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not one of cpu, cuda, cuda:N, auto") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: cpu, cuda, cuda:N or auto")
    if device.type == "cpu":
        return device
    index = (device.index or 0) + rank
    if index >= torch.cuda.device_count():
        there = f"torch sees {counted(torch.cuda.device_count(), 'CUDA device')}"
        if rank:
            raise ConfigError(f"--tensor-parallel-size: rank {rank} would run on cuda:{index}, but {there}")
        raise ConfigError(f"device {name!r} is not there: {there}")
    return torch.device("cuda", index)


def check_division(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError if the model cannot be divided as the settings say: not at all, not on this machine, or not
    with what is for one GPU."""
    size = config.tensor_parallel_size
    if size == 1:
        return
    Shard(size=size).config(model)
    if config.prefix_cache_host_gib:
        raise ConfigError(
            f"--prefix-cache-host-gib {config.prefix_cache_host_gib:g} is for one GPU: leave it at 0 with "
            f"--tensor-parallel-size {size}"
        )
    if ":" in config.device:
        raise ConfigError(f"--device {config.device} is one device, and --tensor-parallel-size {size} takes {size}")
    choose_device(config.device, size - 1)


def longest_context(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of a prompt and what is generated. Raises ConfigError for more than the model has positions."""
    longest = config.max_context_len or model.max_position_embeddings
    if longest > model.longest_context:
        raise ConfigError(
            f"--max-context-len {longest} is more than the {model.longest_context} positions of the model"
        )
    return longest


def spare_cublas_workspace(device: torch.device) -> None:
    """Keep cuBLAS on Hopper to products without a work space, unless the environment says otherwise. Comes before the
    first one.

    On an H200 it clears a work space before large products, though it has others that are as fast without: three
    microseconds and the gaps around it for each of a layer's products (docs/decisions.md). PyTorch takes all products
    of later GPUs to cuBLASLt, which fails without.
    """
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    warnings.filterwarnings("ignore", "Requested unified CUBLASLT workspace size")  # float8 products make do as well


def choose_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV; auto is the checkpoint's own on a GPU and float32 on a CPU. Raises ConfigError."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if dtype is None:
        raise ConfigError(f"the checkpoint's dtype {name!r} is not supported: choose --dtype")
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            raise ConfigError(f"{device} is sm_{capability[0]}{capability[1]}: the GPU must be sm_75 (Turing) or later")
        if dtype == torch.bfloat16 and capability < (8, 0):
            raise ConfigError(f"--dtype bfloat16: {device} is older than Ampere (sm_80); choose --dtype float16")
    return dtype


def make_backend(
    config: EngineConfig,
    model: ModelConfig,
    max_pages: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> tuple[AttentionBackend, int]:
    """The attention backend that was asked for, or the fastest that runs here, and how many faster ones failed.

    `kv_dtype`: that of context pages, if it is another. Raises ConfigError if a backend was asked for by name and does
    not run, or if a GPU has none that reads the pages.
    """
    name = config.attention_backend
    try:
        factory = BACKENDS.get("flashinfer" if name == "auto" else name)
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from None
    arguments = (model, config.page_size, max_pages, dtype, device, kv_dtype)
    reason = why_not(model, dtype, device) if name in ("auto", "flashinfer") else None
    if reason is None:
        try:
            backend = factory(*arguments)
            return backend, backend.fallbacks
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error)
    if name != "auto":
        raise ConfigError(f"--attention-backend {name}: {reason}")
    if device.type == "cuda":
        if kv_dtype not in (None, dtype):
            raise ConfigError(f"--kv-cache-dtype {config.kv_cache_dtype}: {reason}")
        log.warning("attention runs in plain PyTorch, which is slow: %s", reason)
    return BACKENDS.get("torch")(*arguments), int(device.type == "cuda")
