"""What a case is; the cases that this project holds itself to, what it aims for in them, what others need, and
offline.py's table. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from report import table

from widebeam.plan.shapes import SHAPES
from widebeam.plan.work import Shape


class Case(NamedTuple):
    """Prompts of one length, prefilled together and searched as one wave."""

    context: int
    requests: int
    width: int
    tokens: int

    @classmethod
    def parse(cls, text: str, width: int = 256, tokens: int = 3) -> Case:
        """CONTEXTxREQUESTS[xWIDTH[xTOKENS]]"""
        context, requests, *rest = map(int, text.split("x"))
        return cls(context, requests, *rest, *(width, tokens)[len(rest) :])


MAIN = [f"{context}x{requests}" for context in (1000, 5000) for requests in (1, 4, 8)]
WIDTHS = [f"5000x{requests}x{width}" for requests in (1, 4) for width in (32, 128, 512, 1000, 5000)]
DEEP = [f"1000x1x5000x{tokens}" for tokens in (3, 16, 32, 64, 128)]
CASES = {
    "qwen3-0.6b": ["5000x1", "5000x4", *DEEP],
    "qwen3-1.7b": [*MAIN, *WIDTHS],
    "qwen3-4b": ["5000x1", "5000x4"],
}
AIMS = {
    "bf16, full vocabulary": ["13 (14.5)", "37 (41)", "70 (77)", "36 (39)", "122 (131)", "240 (258)"],
    "fp8, catalog": ["11 (13)", "27 (31)", "50 (55)", "27 (30)", "88 (96)", "172 (185)"],
}
"""Milliseconds to aim for and to stay under in MAIN with Qwen3-1.7B's shape, width 256 and 3 tokens, on an H200."""
PEERS = {
    "qwen3-1.7b": {
        "SID-GR, H200": dict(zip(MAIN, ["17.5-18.8", "52.4", "101.0", "46.3", "169.3", "341.2"], strict=True)),
        "SID-GR, H100": dict(zip(MAIN, ["17.6", "47.7", "93.2", "42.3", "154.2", "307.9"], strict=True)),
    },
    "qwen3-0.6b": {
        "SGLang, H200": dict(zip(DEEP, ["158", "1029", "1789", "3554", "8267"], strict=True)),
    },
}
"""NVIDIA SID-GR, bf16, full vocabulary, no catalog, width 256, 3 tokens: measured on an H200 with random weights, and
as published on an H100. SGLang: its published medians, under its own load."""
TIMES = ["p90_ms", "prefill_ms", "prefill_p90_ms", "levels_ms", "levels_p90_ms"]


def name_of(shape: Shape) -> str | None:
    """The shape's name among those with cases, if it is one of them."""
    return next((name for name in CASES if Shape.of(SHAPES[name]) == shape), None)


def cases_of(shape: Shape) -> list[str]:
    """The cases kept for a shape."""
    return CASES.get(name_of(shape) or "", MAIN)


def markdown(report: dict[str, Any]) -> str:
    """One row for each case of offline.py's report."""
    arguments = report["arguments"]
    beside = _beside(report)
    rows = []
    for name, found in report["cases"].items():
        peak = found.get("peak_memory_bytes")
        rows.append(
            [name, found.get("error", found.get("total_ms")), *(found.get(key) for key in TIMES),
             found.get("floor", {}).get("total_ms"), found.get("over_floor"), found.get("replays"),
             found.get("fallbacks"), peak and peak / 2**30, *(numbers.get(name) for numbers in beside.values())]
        )  # fmt: skip
    catalog = "full vocabulary"
    if arguments["catalog"] != "None":
        catalog = f"catalog {Path(arguments['catalog']).name}, normalised by level"
    ranks = arguments.get("tensor_parallel_size", "1")
    divided = "" if ranks == "1" else f", divided among {ranks} processes"
    return "\n".join([
        f"{report['shape'] or Path(arguments['checkpoint']).name}, {report['dtype']}, quantization "
        f"{arguments['quantization']}, {catalog}{divided}; width {arguments['width']} and {arguments['tokens']} tokens "
        f"unless the case says else (CONTEXTxREQUESTSxWIDTHxTOKENS).",
        f"Milliseconds, medians of {arguments['repeats']}. {report['machine']}, {report['date']}. "
        f"Fallbacks since the start: {report['fallbacks']}.",
        "",
        table(["case", "total", "p90", "prefill", "p90", "levels", "p90", "floor", "total / floor", "graph replays",
               "fallbacks", "peak GiB", *beside], rows),
    ])  # fmt: skip


def _beside(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    """What stands beside the measured numbers: the aim of this configuration, and others'. Only where it compares."""
    arguments, shape = report["arguments"], report["shape"]
    if (arguments["width"], arguments["tokens"]) != ("256", "3"):
        return {}
    quantized, constrained = arguments["quantization"] == "fp8", arguments["catalog"] != "None"
    kind = "fp8, catalog" if quantized else "bf16, full vocabulary"
    columns = dict(PEERS.get(shape, {}))
    if shape == "qwen3-1.7b" and quantized == constrained:
        columns = {"aim (limit)": dict(zip(MAIN, AIMS[kind], strict=True))} | columns
    return columns
