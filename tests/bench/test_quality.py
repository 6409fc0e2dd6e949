"""Quality of the MovieLens model through the engine does not fall; and how bench/quality.py judges lists."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import quality

from widebeam.policies import POLICIES

ROOT = Path(__file__).resolve().parents[2]
SHOWN = {
    "recall@10": ".4f", "ndcg@10": ".4f", "first_codes": ".2f", "entropy": ".2f", "coverage": ".3f", "items": ".2f",
    "rows": "d", "cpu_ms": ".1f",
}  # fmt: skip
RECORDED = json.loads((Path(__file__).parent / "recorded_quality.json").read_text())
ALLOWED = 0.02
"""Share of the recorded Recall@10 that may be lost. Of 400 users a single one more or less is 1.2 %."""


@pytest.fixture
def task(tmp_path: Path) -> quality.Task:
    try:
        quality.data.fetch()
    except SystemExit as error:
        pytest.skip(f"MovieLens-100K is not to be had: {error}")
    return quality.Task.load(tmp_path, RECORDED["users"])


async def test_recall_does_not_fall(task: quality.Task) -> None:
    case = quality.Case(RECORDED["policy"], RECORDED["width"])
    (result,) = await quality.measure(task, [case], device="cpu")
    assert result["recall@10"] >= (1 - ALLOWED) * RECORDED["recall@10"]
    assert result["ndcg@10"] >= (1 - ALLOWED) * RECORDED["ndcg@10"]
    assert result["items"] == 10


def test_the_document_shows_what_was_measured() -> None:
    """And what is recorded of some users is what all of them give, but for how much some may differ."""
    results = json.loads(sorted((ROOT / "bench" / "results").glob("*-quality.json"))[-1].read_text())["results"]
    measured = {(one["policy"], str(one["width"]), one["with"].strip("-")): one for one in results}
    section = (ROOT / "docs" / "policies.md").read_text().split("\n## Measured\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert len(rows) > 20 and {row[0] for row in rows[2:]} == set(POLICIES.names())
    for policy, width, given, *shown in rows[2:]:
        one = measured[policy, width, given]
        expected = [format(one[column], form) for column, form in SHOWN.items()]
        assert shown == expected, (policy, width, given)
    (default,) = [
        one for one in results
        if (one["policy"], one["width"]) == (RECORDED["policy"], RECORDED["width"])
    ]  # fmt: skip
    assert abs(default["recall@10"] - RECORDED["recall@10"]) < 3 * default["standard_error"]


def test_lists_are_judged_as_documented() -> None:
    movies = [quality.data.Movie(10 + row, f"Movie {row}", "1990", []) for row in range(8)]
    log = quality.data.Log(movies, [], [], [])
    task = quality.Task(log, Path(), [np.array([7]), np.array([6])], np.array([2, 5]))
    found = quality.judge(task, [[1, 2, 3, 4], [0, 1, 2]], list("aabbccdd"))
    assert found["recall@10"] == 0.5 and found["ndcg@10"] == pytest.approx(0.5 / math.log2(3))
    assert found["standard_error"] == pytest.approx(math.sqrt(0.25 / 2))
    assert found["first_codes"] == 2.5 and found["items"] == 3.5 and found["coverage"] == 5 / 8
    assert found["entropy"] == pytest.approx((1.5 + (2 / 3 * math.log2(1.5) + math.log2(3) / 3)) / 2)
    assert quality.entropy(Counter("abcdefghij")) == pytest.approx(math.log2(10))
