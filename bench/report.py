"""How the benchmarks sum up and write down what they measured: a table for people, JSON for compare.py. Imports no
torch."""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np


def header(arguments: argparse.Namespace) -> dict[str, Any]:
    """When, where and with what options a report was made."""
    given = {name: _elsewhere(str(value)) for name, value in vars(arguments).items() if name != "save"}
    command = shlex.join(_elsewhere(argument) for argument in sys.argv)
    return {"date": date.today().isoformat(), "machine": machine(), "command": command, "arguments": given}


def _elsewhere(value: str) -> str:
    """An option as it means something on other machines: of absolute paths, in lists too, the last part."""
    return re.sub(r"""(?<![^\s='"\[])/[^\s'",\]]*""", lambda path: Path(path[0]).name, value)


def machine() -> str:
    """The device, where the benchmark itself uses one, and what runs on it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return f"client on {platform.machine()}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{device}, torch {torch.__version__}"


def origin(report: dict[str, Any]) -> str:
    """How a report reads at its top: its command, and where and when that ran."""
    return f"{report['command']}\n{report['machine']}, {report['date']}."


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table, its columns padded to one width. Floats keep about four digits; None is shown as `-`."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.4g}"


def quantile(values: Sequence[float], share: float) -> float | None:
    """By nearest rank: a value that was measured."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else None


def quantiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{share * 100:g}_ms": quantile(values, share) for share in (0.5, 0.9, 0.99)}


def save(path: Path | None, report: dict[str, Any], markdown: str) -> None:
    """Write the report as JSON, and its tables beside it, under the same name with the ending .md."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    path.with_suffix(".md").write_text(markdown.rstrip() + "\n")
