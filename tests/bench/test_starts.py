"""bench/starts.py against a real server, and how it reads a log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import starts

from widebeam.engine.compile import Made

ROOT = Path(__file__).parents[2]


def test_two_starts_are_measured_and_written(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    saved = tmp_path / "starts.json"
    starts.main([str(checkpoint), "--warmup", "fast", "--save", str(saved), "--", "--device", "cpu"])
    report = json.loads(saved.read_text())
    assert [(start["warmup"], start["caches"]) for start in report["starts"]] == [("fast", "empty"), ("fast", "filled")]
    for start in report["starts"]:
        assert start["ready_s"] > start["load_s"] > 0
        assert (start["exit_status"], start["fallbacks"], start["late_graphs"]) == (0, 0, 0)
        assert start["compiled"] is None  # nothing is, on a CPU
    rows = [line for line in saved.with_suffix(".md").read_text().splitlines() if line.startswith("| fast")]
    assert len(rows) == 2


def test_a_log_says_what_was_made() -> None:
    log = "\n".join([
        "12:00:00 INFO model on cuda:0 in torch.bfloat16, loaded in 4.5 s",
        f"12:01:00 INFO warm-up: 71 waves in 60.0 s, {Made(9, 120, 0)}",
        f"12:01:10 INFO warm-up: 3 waves in 7.5 s, {Made(compiled=11, captured=126, skipped=1)}",
    ])  # fmt: skip
    found = starts.said(log)
    assert found == {
        "load_s": 4.5, "waves": 74, "warmup_s": 67.5, "compiled": 11, "captured": 126, "skipped": 1,
    }  # fmt: skip
    assert set(starts.said("").values()) == {None}
