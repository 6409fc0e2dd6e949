"""How far `widebeam plan` is from measured waves, and with --fit which rates would be closest. Imports no torch.

    python bench/calibrate.py bench/results/2026-11-30-h200-offline-*.json [--fit] [--gpu h200]

Reports are offline.py's. The fit is least squares over logarithms of predicted / measured: a wave's total weighs twice,
its prefill and its levels less. It prints the fields of `Calibration` (widebeam/plan/gpus.py), and needs scipy (which
comes with scikit-learn).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from matrix import Case
from report import table

from widebeam.config import EngineConfig
from widebeam.plan.estimate import CODES
from widebeam.plan.gpus import GPUS, Calibration, Rates
from widebeam.plan.shapes import SHAPES
from widebeam.plan.waves import WaveModel
from widebeam.plan.work import Prompt

TOTAL, PHASE = 2.0, 0.7
"""Weights of the fit."""


class Deviation(NamedTuple):
    """Predicted over measured."""

    report: str
    case: str
    total: float
    prefill: float
    levels: float


def deviations(paths: Sequence[Path], gpu: str, calibration: Calibration | None = None) -> list[Deviation]:
    """Of all cases that were measured."""
    found = []
    for path in paths:
        report = json.loads(path.read_text())
        given = report["arguments"]
        for name, measured in report["cases"].items():
            if "total_ms" not in measured:
                continue
            context, requests, width, tokens = Case.parse(name, int(given["width"]), int(given["tokens"]))
            waves = WaveModel(
                SHAPES[report["shape"]], GPUS[gpu], width, tokens, fp8=given["quantization"] == "fp8",
                codes=None if given["catalog"] == "None" else CODES,
                max_rows=max(EngineConfig(model="").max_wave_rows, requests * width),
            )  # fmt: skip
            if calibration:
                waves.rates = waves.work.timer = Rates(GPUS[gpu], calibration=calibration)
            time = waves.time([Prompt(context)] * requests)
            ratios = (time.total, time.prefill, time.levels)
            keys = ("total_ms", "prefill_ms", "levels_ms")
            found.append(
                Deviation(path.stem, name, *(ms / measured[key] for ms, key in zip(ratios, keys, strict=True)))
            )
    return found


def fit(paths: Sequence[Path], gpu: str) -> Calibration:
    """The calibration that is closest to the reports, from the present one on and within a factor of 2 of it."""
    start = asdict(Calibration())

    def residuals(values: Sequence[float]) -> list[float]:
        calibration = Calibration(**dict(zip(start, values, strict=True)))
        return [
            weight * math.log(ratio)
            for one in deviations(paths, gpu, calibration)
            for weight, ratio in ((TOTAL, one.total), (PHASE, one.prefill), (PHASE, one.levels))
        ]

    values = list(start.values())
    bounds = [value / 2 for value in values], [value * 2 for value in values]
    found = importlib.import_module("scipy.optimize").least_squares(residuals, values, bounds=bounds, x_scale=values)
    return Calibration(**dict(zip(start, map(float, found.x), strict=True)))


def markdown(found: list[Deviation]) -> str:
    """All cases, and the worst of each report."""
    worst: dict[str, list[Any]] = {}
    for name in dict.fromkeys(one.report for one in found):
        own = [one for one in found if one.report == name]
        worst[name] = [max(abs(getattr(one, key) - 1) for one in own) for key in ("total", "prefill", "levels")]
    columns = ["predicted / measured", "case", "total", "prefill", "levels"]
    return f"{table(columns, found)}\n\n" + table(
        ["worst deviation", "total", "prefill", "levels"],
        [[name, *(f"{share:.1%}" for share in row)] for name, row in worst.items()],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--fit", action="store_true")
    chosen = parser.parse_args()
    better = fit(chosen.reports, chosen.gpu) if chosen.fit else None
    print(markdown(deviations(chosen.reports, chosen.gpu, better)))
    if better:
        print("\n" + "\n".join(f"{name} = {value:.4g}" for name, value in asdict(better).items()))
