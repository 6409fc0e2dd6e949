"""bench/soak.py against real servers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
import soak
from servers import metrics

from tests import tiny
from tests.http.service import running_service

ROOT = Path(__file__).parents[2]


def test_every_answer_is_checked_and_memory_sampled(checkpoint: Path, catalog_file: Path, tmp_path: Path) -> None:
    options = "--vary --requests 20 --concurrency 3 --context 30 --width 8 --tokens 3 --vocab 50 --sample-s 0.1"
    saved = tmp_path / "soak.json"
    second = tiny.save_catalog(tmp_path / "second.jsonl", seed=1)
    command = [sys.executable, "bench/soak.py", str(checkpoint), *options.split(), "--save", str(saved)]
    command += ["--", "--log-level", "warning", "--catalog", f"first={catalog_file}", f"second={second}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    report = json.loads(saved.read_text())
    assert (report["answered"], report["exit_status"], report["fallbacks"], report["late_graphs"]) == (21, 0, 0, 0)
    assert report["sent"].keys() == {"first", "second", "none"} and sum(report["sent"].values()) == 21
    assert report["searches"] == report["http"] == {"ok": 21}
    assert report["left"].keys() == set(soak.LEFT) and not any(report["left"].values())
    assert report["wrong"] == [] and "Nothing is wrong." in saved.with_suffix(".md").read_text()
    host = report["memory"]["host"]
    assert host["samples"] > 1 and host["first"] > 1 << 20


async def test_what_is_left_or_missing_is_wrong(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "REST_S", 0.2)
    options = Namespace(vary=False, requests=3, minutes=0.0, sample_s=1.0, concurrency=2, context=20, width=4, tokens=2)
    options.vocab, options.growth_mib = 50, 32.0
    with running_service(checkpoint, None) as service:
        core = service.engine._runtime.core
        lease = core.context.acquire(2 * service.engine.config.page_size)
        assert lease is not None
        found = await soak.Soak(options).run(service.url, os.getpid())
        assert (found["sent"], found["searches"]) == ({"none": 4}, {"ok": 4})
        assert found["wrong"] == ["context_pages_leased is 2, not 0"]
        core.context.release(lease)
        now = await metrics(service.url)
    assert soak.judged(now, 4)["wrong"] == []
    assert [one.split()[0] for one in soak.judged(now, 5)["wrong"]] == ["searches", "answers"]
    assert soak.judged(now | {"fallbacks_total": 1.0}, 4)["wrong"] == ["fallbacks is 1, not 0"]
    lost = now | {'searches_total{outcome="cancelled"}': 1.0}
    assert soak.judged(lost, 4)["wrong"] == ["searches by outcome are {'ok': 4, 'cancelled': 1}, not ok: 4"]


def growths(series: Sequence[float]) -> list[str]:
    """What is wrong with memory that is so many MiB over time."""
    return soak.grown({"gpu": soak.thirds([int(size * 2**20) for size in series])}, 32.0)


def test_memory_may_settle_and_vary_but_not_grow() -> None:
    rng = random.Random(0)
    assert growths([500.0] * 9) == growths([500.0 - step for step in range(60)]) == []
    assert growths([500.0 + rng.uniform(-100, 100) * (rng.random() < 0.4) for _ in range(90)]) == []  # peaks, no trend
    assert growths([min(500.0 + 30 * step, 800.0) for step in range(90)]) == []  # caches fill, then nothing
    assert growths([500.0 + step for step in range(90)]) == []  # 30 from third to third
    (wrong,) = growths([500.0 + 2 * step for step in range(90)])
    assert wrong.startswith("memory on the gpu grew by 60.0 MiB") and "--growth-mib 32" in wrong
    assert len(growths([500.0 + 2 * step + rng.uniform(-20, 20) for step in range(90)])) == 1
    assert len(growths([500.0] * 65 + [600.0] * 25)) == 1  # a step, late


def test_a_few_samples_say_nothing_of_growth() -> None:
    assert soak.thirds([1, 2, 3]) == {"samples": 3, "first": 1, "middle": None, "last": 3, "growth": None}
    assert growths([1.0 + 100 * step for step in range(8)]) == [] != growths([1.0 + 100 * step for step in range(9)])


def test_a_server_whose_memory_grows_fails(checkpoint: Path, tmp_path: Path) -> None:
    """With less allowed than anything grows by: the run ends with status 1 and says why."""
    options = "--requests 1 --minutes 0.03 --context 30 --width 8 --vocab 50 --sample-s 0.1 --growth-mib -1000"
    command = [sys.executable, "bench/soak.py", str(checkpoint), *options.split(), "--save", str(tmp_path / "s.json")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    report = json.loads((tmp_path / "s.json").read_text())
    host = report["memory"]["host"]
    assert done.returncode == 1 and "WRONG: memory on the host grew by" in done.stderr
    assert host["samples"] >= soak.LEAST_SAMPLES and host["growth"] == host["last"] - host["middle"]
    assert len(report["wrong"]) == 1 and report["wrong"][0] in (tmp_path / "s.md").read_text()
