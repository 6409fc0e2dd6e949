"""What a start takes of a GPU's memory, by what it is for, and what it says where that is more than there is.

What weights, rooms and the least pools take is known before anything is read. The rest is work space: known once the
largest waves have run, and in part if they, or anything else at start, run out of memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from widebeam.config import EngineConfig
from widebeam.engine.pool_sizes import PoolSizes, least_sizes
from widebeam.errors import ConfigError
from widebeam.model import fp8
from widebeam.model.config import ModelConfig
from widebeam.model.weights import weight_bytes

GIB = 2**30
TRIED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
"""In what torch says when it finds no memory."""
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


class Part(NamedTuple):
    """What something takes, in bytes, and the settings by which it would take less: some lower, others as they are
    written."""

    size: int
    lower: tuple[str, ...] = ()
    choose: tuple[str, ...] = ()


@dataclass
class Needs:
    """Of one engine on one device; on a CPU they are never looked at."""

    config: EngineConfig
    model: ModelConfig
    """What the device has of it."""
    max_context_len: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    fp8: bool
    before: int = field(init=False)
    """Bytes of this process that others hold."""
    context_pages: int | None = None
    """Of the context pool, once it has got all that was left."""

    def __post_init__(self) -> None:
        self.before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    @property
    def least(self) -> PoolSizes:
        """The least pools."""
        return least_sizes(self.config, self.max_context_len)

    @property
    def page_bytes(self) -> int:
        """Of one page of the context pool."""
        return self.model.kv_elements_per_token * self.kv_dtype.itemsize * self.config.page_size

    @property
    def beam_bytes(self) -> int:
        """Of the beam pool."""
        return self.model.kv_elements_per_token * self.dtype.itemsize * self.least.beam_slots

    def room(self) -> int:
        """Bytes that the engine may hold in all: its share of the device, less what is not its own."""
        free, total = self._free_and_total()
        return int(total * self.config.gpu_memory_utilization) - self._others(free, total)

    def require(self, total: int | None = None) -> int:
        """Raise ConfigError if the engine may not hold `total` bytes, by default what it holds at the very least; how
        many more it may."""
        if self.device.type != "cuda":
            return 0
        needed = sum(part.size for part in self._known().values()) if total is None else total
        if (left := self.room() - needed) < 0:
            raise ConfigError(self._told(-left, needed, exact=total is not None))
        return left

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises ConfigError where something runs out of the device's memory within, with `why`."""
        try:
            yield
        except RuntimeError as error:
            if self.device.type != "cuda" or not _ran_out(error):
                raise
            raise ConfigError(self.why(error)) from None

    def why(self, error: RuntimeError) -> str:
        """How much is missing, at least, where this was raised for want of memory, and what helps."""
        if self.device.type != "cuda":
            return str(error)
        found = TRIED.search(str(error))
        tried = int(float(found[1]) * UNITS[found[2]]) if found else 1
        free, _ = self._free_and_total()
        needed = max(
            torch.cuda.memory_allocated(self.device) - self.before + tried,
            sum(part.size for part in self._known().values()),
        )
        return self._told(max(needed - self.room(), tried - free, 1), needed, exact=False)

    def _known(self) -> dict[str, Part]:
        """All but the work space."""
        config, wide = self.config, self.dtype == torch.bfloat16 and not self.fp8
        quantizes = wide and torch.cuda.get_device_capability(self.device) >= fp8.CAPABILITY
        halves = self.kv_dtype == self.dtype and fp8.why_no_pages(self.model, self.dtype, self.device) is None
        if config.max_total_tokens is not None:
            lower = "--max-total-tokens"
        elif self.context_pages is not None:
            lower = "--gpu-memory-utilization"
        else:
            lower = "--max-wave-tokens" if config.max_wave_tokens > self.max_context_len else "--max-context-len"
        rows = () if config.beam_kv_tokens is not None else ("--max-wave-rows",)
        return {
            "weights": Part(
                weight_bytes(self.model, self.dtype, fp8=self.fp8), (), ("--quantization fp8",) if quantizes else ()
            ),
            "catalogs and filters": Part(
                int(config.catalog_memory_gib * GIB) + int(config.filter_memory_gib * GIB),
                ("--catalog-memory-gib", "--filter-memory-gib"),
            ),
            "beams' KV": Part(self.beam_bytes, (*rows, "--beam-kv-tokens")),
            "context KV": Part(
                (self.context_pages or self.least.context_pages) * self.page_bytes,
                (lower,),
                ("--kv-cache-dtype fp8",) if halves else (),
            ),
        }

    def _told(self, short: int, needed: int, *, exact: bool) -> str:
        parts = self._known()
        work = needed - sum(part.size for part in parts.values())
        if work > 0:
            eager = () if self.config.enforce_eager else ("--enforce-eager",)
            flags = ("--max-wave-tokens", "--max-wave-rows", "--max-beam-width", "--max-context-len")
            parts["work space"] = Part(work, flags, eager)
        free, total = self._free_and_total()
        others, share = self._others(free, total), self.config.gpu_memory_utilization
        sizes = ", ".join(f"{name} {part.size / GIB:.2f}" for name, part in parts.items())
        return (
            f"{'' if exact else 'at least '}{max(short / GIB, 0.01):.2f} GiB of memory are missing on {self.device}: a "
            f"start takes {sizes}{'' if exact else ' or more'}, and of {total / GIB:.2f} GiB {others / GIB:.2f} are in "
            f"use already and --gpu-memory-utilization {share:g} leaves {max(self.room(), 0) / GIB:.2f}. "
            + self._helps(short, parts)
        )

    def _helps(self, short: int, parts: dict[str, Part]) -> str:
        """The settings that can make up for what is missing."""
        if sum(part.size for part in parts.values()) - parts["weights"].size < short:
            parts = {"weights": parts["weights"]}  # lowering the rest to nothing would not do
        ways = []
        if self.context_pages is None and self.config.gpu_memory_utilization < 1:
            ways.append("raise --gpu-memory-utilization")
        if lower := dict.fromkeys(flag for part in parts.values() for flag in part.lower):
            ways.append("lower " + ", ".join(lower))
        choose = [flag for part in parts.values() for flag in part.choose]
        ways.append("choose " + ", ".join([*choose, "another --device", "or a larger --tensor-parallel-size"]))
        return f"What helps: {'; '.join(ways)}"

    def _others(self, free: int, total: int) -> int:
        """Bytes that are not the engine's: of other processes, of CUDA itself, and of others in this process."""
        return total - free - torch.cuda.memory_reserved(self.device) + self.before

    def _free_and_total(self) -> tuple[int, int]:
        try:
            return torch.cuda.mem_get_info(self.device)
        except RuntimeError as error:
            if not _ran_out(error):
                raise
            return 0, torch.cuda.get_device_properties(self.device).total_memory  # CUDA itself finds no room


def _ran_out(error: RuntimeError) -> bool:
    """Libraries that allocate by themselves raise errors of other kinds."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
