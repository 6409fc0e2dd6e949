"""The formula of `widebeam plan` against what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import calibrate
import pytest
from random_catalog import make_catalog, random_sids

from widebeam.constraints.arena import NODE_BYTES, num_places
from widebeam.plan.estimate import tree_bytes

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
REPORTS = sorted(RESULTS.glob("2026-11-30-h200-offline-*.json"))


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem.split("offline-")[1])
def test_waves_are_predicted_as_they_were_measured(report: Path) -> None:
    found = calibrate.deviations([report], "h200")
    assert len(found) == len(json.loads(report.read_text())["cases"])
    worst = max(found, key=lambda one: abs(math.log(one.total)))
    print(f"worst of {report.name}: {worst.case}, {worst.total:.3f} of what was measured")
    assert 0.9 < worst.total < 1.1
    assert all(0.8 < one.prefill < 1.2 and 0.7 < one.levels < 1.3 for one in found)


def test_a_tree_of_random_items_takes_what_a_catalog_takes() -> None:
    catalog = make_catalog(random_sids(3000, 3, 32), 32, 0)
    assert tree_bytes(3000, 3, 32) == pytest.approx(num_places(catalog) * NODE_BYTES, rel=0.03)
