"""bench/soak.py against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_answer_is_checked_and_memory_sampled(checkpoint: Path, tmp_path: Path) -> None:
    options = "--vary --requests 12 --concurrency 3 --context 30 --width 8 --tokens 3 --vocab 50 --sample-s 0.1"
    command = [
        sys.executable,
        "bench/soak.py",
        str(checkpoint),
        *options.split(),
        "--save",
        str(tmp_path / "soak.json"),
    ]
    subprocess.run([*command, "--", "--log-level", "warning"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    report = json.loads((tmp_path / "soak.json").read_text())
    assert (report["answered"], report["exit_status"], report["fallbacks"]) == (13, 0, 0)
    host = report["memory"]["host"]
    assert host["growth"] == host["last"] - host["settled"] and host["first"] > 1 << 20
