"""How a report of online.py reads: its tables, and its picture."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from report import table

Level = dict[str, Any]
"""One level of load, or a whole report, by names."""

COLUMNS = {
    "load": "load", "seconds": "s", "sent": "sent", "ok": "ok", "refused": "429", "failed": "failed",
    "requests_per_s": "req/s", "rate_error": "req/s +-", "goodput_per_s": "goodput",
    "latency_p50_ms": "p50", "latency_p90_ms": "p90", "latency_p99_ms": "p99",
    "queue_ms": "queue", "prefill_ms": "prefill", "decode_ms": "decode", "total_ms": "engine", "handler_ms": "handler",
    "wave_host_ms": "host a wave",
    "late_p99_ms": "late p99", "client_cpu": "client CPU", "goodput_of_peak": "goodput / peak",
    "refused_share": "share of 429",
}  # fmt: skip


def markdown(report: Level) -> str:
    """The tables of a report; times in ms."""
    levels, blocks = report["levels"], []
    used = [key for key in COLUMNS if any(level.get(key) is not None for level in levels)]
    if levels:
        rows = [[shown(level.get(key)) for key in used] for level in levels]
        blocks.append(table([COLUMNS[key] for key in used], rows))
    for part in ("http_overhead", "health"):
        if part in report:
            blocks.append(table([part, "value"], [(key, shown(value)) for key, value in report[part].items()]))
    return "\n\n".join(blocks)


def shown(value: object) -> object:
    """Outcomes that failed, by what they were, in a cell."""
    return ", ".join(f"{key}: {count}" for key, count in value.items()) or 0 if isinstance(value, dict) else value


def plot(report: Level, path: Path) -> None:
    """Latency against throughput: lines for closed loops and open ones, marks alone for bursts and traces."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for kind, style in (("closed", "o-"), ("open", "s--"), ("bursts", "^"), ("trace", "x")):
        levels = [one for one in report["levels"] if one["kind"] == kind and one["ok"]]
        levels.sort(key=lambda one: one["requests_per_s"])
        for color, part in zip(("C0", "C1", "C3"), ("p50", "p90", "p99"), strict=True):
            if levels:
                points = [[one[key] for one in levels] for key in ("requests_per_s", f"latency_{part}_ms")]
                axes.plot(*points, style, color=color, label=f"{part}, {kind}")
        for one in levels:
            at = (one["requests_per_s"], one["latency_p50_ms"])
            axes.annotate(one["load"], at, xytext=(6, -9), textcoords="offset points", fontsize=8)
    axes.set(xlabel="answers per second", ylabel="latency, ms", title=title(report))
    axes.set_xlim(0, 1.15 * max((one["requests_per_s"] for one in report["levels"]), default=1.0))  # room for names
    drawn = [one[f"latency_{part}_ms"] for one in report["levels"] if one["ok"] for part in ("p50", "p99")]
    if drawn and max(drawn) > 10 * min(drawn):
        ticks = importlib.import_module("matplotlib.ticker").LogFormatter(minor_thresholds=(2, 0.8))
        axes.set(yscale="log", ylabel="latency, ms (log scale)")
        axes.yaxis.set_major_formatter(ticks)
        axes.yaxis.set_minor_formatter(ticks)
    else:
        axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3, which="both")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def title(report: Level) -> str:
    """What was asked of which machine, and when."""
    given = report["arguments"]
    asked = f"context {given['context']}, width {given['width']}"
    if given["mixed"] == "True":
        asked = f"mixed contexts {given['mixed_context']} and widths {given['mixed_width']}"
    count = max(int(given.get("replicas", 1)), given["url"].count("://"))
    where = report["server"].get("machine", report["machine"])
    return f"{asked}; {f'{count} servers, ' if count > 1 else ''}{where}, {report['date']}"
