"""How a report of history.py reads. Imports no torch."""

from __future__ import annotations

from typing import Any

from report import origin, table

Modes = dict[str, Any]
"""What was measured, by mode, then by part."""


def markdown(report: dict[str, Any]) -> str:
    """A table for each part that was measured, and one of memory."""
    modes = report["modes"]
    parts = [made(modes) for part, made in TABLES.items() if part in modes["off"]]
    return "\n\n".join([origin(report), *parts])


def _single(modes: Modes) -> str:
    """`cached`: the fewest tokens that a repeat found."""
    names = ("total_ms", "p90_ms", "restore_ms", "prefill_ms", "levels_ms", "call_ms", "call_p90_ms")
    rows = [
        [mode, place, min(times["cached_tokens"]), *(times[name] for name in names)]
        for mode, found in modes.items()
        for place, times in found["single"].items()
    ]
    return table(
        ["single", "history is", "cached", "total", "p90", "restore", "prefill", "levels", "call", "p90"], rows
    )


def _replay(modes: Modes) -> str:
    """`requests hit` and what follows are shares; tokens from the host do not count as on the device."""
    rows = []
    for name, off in modes["off"]["replay"].items():
        for mode, found in modes.items():
            one = found["replay"][name]
            on_device = one["hit_tokens"] - one["restored_tokens"]
            rows.append([
                name, mode, one["users"], one["visits"], one["prompt_tokens"], one["requests_per_s"],
                one["requests_per_s"] / off["requests_per_s"], one["hit_requests"], on_device, one["restored_tokens"],
                one["latency_p50_ms"], one["latency_p99_ms"],
            ])  # fmt: skip
    columns = ["replay", "cache", "users", "visits", "prompt tokens", "req/s", "times off", "requests hit"]
    return table([*columns, "tokens on device", "from host", "p50", "p99"], rows)


def _cold(modes: Modes) -> str:
    """`cached`: tokens that were found after all, over all repeats."""
    rows, off = [], modes["off"]["cold"]
    for mode, found in modes.items():
        cold = found["cold"]
        total, call = cold["total_ms"], cold["call_ms"]
        ratios = total / off["total_ms"], call / off["call_ms"]
        rows.append([mode, sum(cold["cached_tokens"]), total, cold["p90_ms"], ratios[0], call, ratios[1]])
    return table(["cold", "cached", "total", "p90", "times off", "call", "times off"], rows)


def _memory(modes: Modes) -> str:
    columns = ["memory", *(name.replace("_", " ") for name in modes["off"]["memory"])]
    return table(columns, [[mode, *found["memory"].values()] for mode, found in modes.items()])


TABLES = {"single": _single, "replay": _replay, "cold": _cold, "memory": _memory}
