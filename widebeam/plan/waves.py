"""How long a wave takes: the sum of its parts by a GPU's rates. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from widebeam.config import EngineConfig
from widebeam.model.config import ModelConfig
from widebeam.plan.gpus import Gpu, Rates
from widebeam.plan.work import Part, Prompt, Shape, Work, phase_ms

HOST_MS, HOST_ROW_MS = 1.0, 0.0034
"""From the end of a wave to its results in Python, and for each sequence of it: wall time of bench/offline.py's waves
less the device's. The next wave runs meanwhile."""


class WaveTime(NamedTuple):
    """Milliseconds of the device, and until the results are there."""

    prefill: float
    levels: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """Of the device."""
        return self.prefill + self.levels


class WaveModel:
    """Times of waves of one model, width and number of tokens on one GPU."""

    def __init__(
        self, model: ModelConfig, gpu: Gpu, width: int, tokens: int, *,
        fp8: bool = False, codes: int | None = None, kv_bytes: int = 2, max_rows: int | None = None,
    ) -> None:  # fmt: skip
        self.width, self.tokens = width, tokens
        self.rates = Rates(gpu, kv_bytes)
        max_rows = max_rows or EngineConfig(model="").max_wave_rows
        self.work = Work(Shape.of(model), self.rates, fp8=fp8, codes=codes, max_rows=max_rows)

    def time(self, prompts: Sequence[Prompt]) -> WaveTime:
        """Of a wave of these prompts."""
        fit = self.rates.calibration
        prefill, *levels = phase_ms(self._parts(prompts)).values()
        host = HOST_MS + HOST_ROW_MS * len(prompts) * self.width
        return WaveTime(prefill + fit.wave_ms, sum(levels) + fit.level_ms * (self.tokens - 1), host)

    def shares(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Of a wave's time, by phase and what it goes to, the largest first."""
        sums: dict[str, float] = defaultdict(float)
        for part in self._parts(prompts):
            phase = part.phase.split()[0].replace("level", "levels")
            sums[f"{_kind(part.name)} of {phase}"] += part.ms * part.times
        total = self.time(prompts).total
        shares = {name: ms / total for name, ms in sums.items()}
        shares["starts of waves and levels"] = 1.0 - sum(shares.values())
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def _parts(self, prompts: Sequence[Prompt]) -> list[Part]:
        return self.work.wave(prompts, self.width, self.tokens)


def _kind(part: str) -> str:
    """What a part mostly is."""
    if "attention" in part:
        return "attention"
    if "bytes" in part:
        return "memory traffic"
    return "head" if part in ("head", "logits read") else "products"
