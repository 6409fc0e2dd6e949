"""bench/starts.py against a real server, and how it reads a log."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import starts
import torch

from tests.model.test_attention import CONFIG
from widebeam.engine.compile import Made
from widebeam.model.flashinfer import FlashInferBackend

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
        assert start["kernels_s"] is start["compiled"] is None  # nothing is, on a CPU
    rows = [line for line in saved.with_suffix(".md").read_text().splitlines() if line.startswith("| fast")]
    assert len(rows) == 2


def test_a_log_says_what_was_made() -> None:
    log = "\n".join([
        "11:59:58 INFO FlashInfer's fa3 kernels are there after 1.2 s",
        "12:00:00 INFO model on cuda:0 in torch.bfloat16, loaded in 4.5 s",
        f"12:01:00 INFO warm-up: 71 waves in 60.0 s, {Made(9, 120, 0)}",
        f"12:01:10 INFO warm-up: 3 waves in 7.5 s, {Made(compiled=11, captured=126, skipped=1)}",
    ])  # fmt: skip
    found = starts.said(log)
    assert found == {
        "kernels_s": 1.2, "load_s": 4.5, "waves": 74, "warmup_s": 67.5, "compiled": 11, "captured": 126, "skipped": 1,
    }  # fmt: skip
    assert set(starts.said("").values()) == {None}


def test_how_long_kernels_took_is_read_from_the_line_of_the_backend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line a start: older kernels that had to be tried after newer ones are in it, too."""

    def attempt(backend: FlashInferBackend) -> None:
        if backend.kernel == "fa3":
            raise RuntimeError("it does not build")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(FlashInferBackend, "_try", attempt)
    with caplog.at_level(logging.INFO, "widebeam"):
        FlashInferBackend(CONFIG, 16, 64, torch.bfloat16, torch.device("cpu"))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert line.startswith("FlashInfer's fa2 kernels are there") and starts.said(line)["kernels_s"] >= 0
