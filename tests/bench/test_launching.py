"""bench/launching.py: parts of a launch."""

from __future__ import annotations

from pathlib import Path

import launching
import offline
import pytest


def test_parts_count_without_what_is_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(launching.time, "perf_counter", lambda: now)
    timer = launching.Timer()
    inner = timer.timed("inner", work)

    def outer() -> None:
        inner(2)
        work(3)
        timer.timed("other", lambda: inner(5))()

    timer.timed("outer", outer)()
    inner(7)
    assert timer.seconds == {"outer": 3, "inner": 14, "other": 0}


def test_parts_add_up_to_a_launch(checkpoint: Path) -> None:
    chosen = offline.options("").parse_args(
        [str(checkpoint), "--cases", "20x2", "30x1", "--width", "4", "--repeats", "2"]
    )
    report = launching.run(chosen)
    assert list(report["cases"]) == ["20x2", "30x1"] and report["fallbacks"] == 0
    for found in report["cases"].values():
        assert min(found["parts"].values()) > 0 and found["least_ms"] <= found["launch_ms"] <= found["p90_ms"]
    lines = launching.markdown(report).splitlines()
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == [
        "case", "launch", "p90", "least", "wave", "arrays", "copies", "plans", "replays", "other"
    ]  # fmt: skip
    assert [line.split()[1] for line in lines[5:]] == ["20x2", "30x1"]


def test_nothing_is_timed_any_more_behind_it(checkpoint: Path) -> None:
    chosen = offline.options("").parse_args([str(checkpoint), "--cases", "20x1", "--width", "4"])
    bench = offline.prepare(chosen)
    programs, timer = bench.runtime.core.programs, launching.Timer()
    with pytest.raises(KeyError), timer.of(bench.runtime):
        raise KeyError
    launching.launches(bench.runtime, bench.waves["20x1"][1], 1)
    assert not timer.seconds and bench.runtime.core.programs is programs
