"""What a long step of a start says meanwhile."""

from __future__ import annotations

import io
import logging
import sys
from functools import partial

import pytest
from tqdm import tqdm

from widebeam.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = iter([0.0, 1.0, 9.0, 12.0, 13.0, 22.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    assert list(progress("abcde", "loading weights", "shard")) == ["a", "b", "c", "d", "e"]
    assert caplog.messages == ["loading weights: 2 of 5, 12 s", "loading weights: 4 of 5, 22 s"]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("widebeam.progress.tqdm", partial(tqdm, disable=False))  # which the suite turns off
    assert list(progress([3, 1], "capturing", "size")) == [3, 1]
    assert "capturing: 100%" in sys.stderr.getvalue() and not caplog.messages  # type: ignore[attr-defined]
