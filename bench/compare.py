"""Did anything get worse? Compares two reports of offline.py or of accuracy.py.

    python bench/compare.py OLD.json NEW.json

Prints a table and ends with status 1 if a case is missing or failed, if one is more than 3 % slower (`total_ms`), or
if any accuracy figure is worse: best sequences, overlaps and equal sets of each comparison, score errors, Recall@10 and
NDCG@10. What only the new report has is shown and passes. Only reports of the same options, from machines of one kind,
compare: what differs is named.

Two runs of the same code differ by chance in one way: which prompts share a wave is up to time, and on a GPU the last
digits of scores depend on that (on a CPU three runs, and waves of four sizes, agreed to the bit; on a GPU it is still
to be measured). It has never changed a sequence: `alone` is 1 in all reports. So shares and recall have no allowance.
In those of the MovieLens example bfloat16 changes 55 of 8192 sequences; as company changes none, it moves scores by a
few hundredths of what bfloat16 does, and at random, which leaves a high quantile of the errors where it is but for a
hundredth: they may grow by 1 %.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from report import table

SLOWER = 1.03
"""Largest ratio of times that passes."""
ERROR_GROWTH = 1.01
"""Largest ratio of score errors that passes."""
SHARES = ("top1", "overlap", "overlap_min", "exact_sets", "recall@10", "ndcg@10")
"""Accuracy figures of which more is better; of the others, errors, less is."""
ERRORS = ("p99", "max")


class Row(NamedTuple):
    """One figure of one case; None where a report lacks it."""

    case: str
    figure: str
    old: float | None
    new: float | None

    @property
    def change(self) -> float | None:
        return self.new / self.old if self.old and self.new is not None else None

    @property
    def verdict(self) -> str:
        """`ok` and `new` pass."""
        if self.new is None:
            return "missing"
        if self.old is None:
            return "new"
        name = self.figure.rsplit(": ")[-1]
        if name in SHARES:
            return "less accurate" if self.new < self.old else "ok"
        if name in ERRORS:
            return "less accurate" if self.new > self.old * ERROR_GROWTH else "ok"
        return "slower" if self.new > self.old * SLOWER else "ok"

    @property
    def passes(self) -> bool:
        return self.verdict in ("ok", "new")


def figures(report: dict[str, Any]) -> dict[tuple[str, str], float]:
    """What is judged, by case and name: the time of a case, shares and errors of each of its comparisons; how well
    each variant of the engine recommends."""
    found: dict[tuple[str, str], float] = {}
    for case, measured in (report["cases"] | {"recall": report.get("recall", {})}).items():
        if "total_ms" in measured:
            found[case, "total_ms"] = measured["total_ms"]
        for comparison, values in measured.items():
            if isinstance(values, dict):
                judged = [name for name in (*SHARES, *ERRORS) if name in values]
                found |= {(case, f"{comparison}: {name}"): values[name] for name in judged}
    return found


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[Row]:
    """A row for each figure of either report. A case with no figures in both counts as missing."""
    before, after = figures(old), figures(new)
    rows = [Row(case, name, before.get((case, name)), after.get((case, name))) for case, name in before | after]
    unmeasured = sorted(old["cases"].keys() - {row.case for row in rows})
    return rows + [Row(case, "total_ms", None, None) for case in unmeasured]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (arguments.old, arguments.new))
    if not all("cases" in one for one in (old, new)):
        parser.error("one of the two is no report of offline.py or accuracy.py: it has no cases")
    rows = compare(old, new)
    columns = ["case", "figure", "old", "new", "new / old", "verdict"]
    print(table(columns, [(*row, row.change, row.verdict) for row in rows]))
    if old.get("machine") != new.get("machine"):
        print(f"\nNot the same machine: {old.get('machine')} and {new.get('machine')}.")
    before, after = old.get("arguments", {}), new.get("arguments", {})
    for name in sorted(name for name in before.keys() & after.keys() if before[name] != after[name]):
        print(f"\nNot the same option {name}: {before[name]} and {after[name]}.")
    bad = sum(not row.passes for row in rows)
    print(f"\n{bad} of {len(rows)} figures are worse or missing." if bad else f"\nNone of {len(rows)} is worse.")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
