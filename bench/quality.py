"""What policies and widths buy and cost: the MovieLens model through the engine, every user's last movie held out.

    python bench/quality.py [--users 200] [--save FILE.json] [--plot FILE.png]

For each case: Recall@10 with its standard error and NDCG@10, and how different the ten movies of a list are:
`first_codes`, distinct first codes in it; `entropy`, of its first codes, in bits (all ten different: 3.32). `coverage`
is the share of all movies that are in some user's list, `items` how many movies came back, ten at most, `rows` how many
rows the network decodes for a request, `cpu_ms` the CPU time of the whole process for one, on this machine. The data
are fetched as in examples/movielens/data.py; watched movies are left out inside the search.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from report import header, save, table

from widebeam import Engine, SearchParams
from widebeam.policies import PolicySpec

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "movielens"
sys.path.insert(0, str(EXAMPLE))  # its scripts import each other by their plain names
import catalog as movie_catalog  # noqa: E402
import data  # noqa: E402
import metrics  # noqa: E402

LOOKED_AT = 10
CONCURRENCY = 32
COLUMNS = ("recall@10", "ndcg@10", "first_codes", "entropy", "coverage", "items", "rows", "cpu_ms")


@dataclass(frozen=True)
class Case:
    """One way to search. Of the `n` movies asked for, the first ten are looked at."""

    policy: str
    width: int
    fields: dict[str, Any] = field(default_factory=dict)
    n: int = LOOKED_AT

    @property
    def name(self) -> str:
        given = {name: value for name, value in self.fields.items() if name != "widths"}
        shown = [f"{name} {value}" for name, value in given.items()]
        if "widths" in self.fields:
            shown.append(" ".join(map(str, self.fields["widths"])))
        return ", ".join([*shown, *([f"n {self.n}"] if self.n != LOOKED_AT else [])]) or "-"

    def params(self) -> SearchParams:
        width = None if "widths" in self.fields else self.width
        return SearchParams(beam_width=width, policy=PolicySpec(name=self.policy, **self.fields))


CASES = [
    *(Case("fixed", width) for width in (10, 16, 32, 64, 128, 256)),
    *(Case("scheduled", max(widths), {"widths": widths}) for widths in (
        (8, 32, 32), (16, 32, 32), (32, 16, 16), (16, 64, 16), (32, 64, 64), (64, 32, 32),
    )),
    *(Case("score_margin", 64, {"margin": margin}) for margin in (1.0, 2.0, 3.0, 4.0, 6.0)),
    *(Case("nucleus", 64, {"mass": mass}) for mass in (0.5, 0.8, 0.9, 0.95, 0.99)),
    *(Case("diverse", 64, {"cap": cap}) for cap in (1, 2, 3, 5, 8)),
    *(Case("diverse", 256, {"cap": cap}) for cap in (1, 3, 8)),
    *(Case("stochastic", max(n, 64), {}, n) for n in (10, 32, 64)),
    Case("stochastic", 256, {}, 256),
]  # fmt: skip


@dataclass
class Task:
    """Histories as item ids, and what was watched next."""

    log: data.Log
    catalog: Path
    histories: list[np.ndarray]
    targets: np.ndarray

    @classmethod
    def load(cls, folder: Path, users: int | None) -> Task:
        log = data.load()
        sids = movie_catalog.read_sids(EXAMPLE / "sids.csv")
        catalog = movie_catalog.write_catalog(folder, log.movies, sids, max_items=64)
        histories, targets = log.test()
        some = np.arange(len(histories)) if users is None else np.arange(users) * len(histories) // users
        return cls(log, catalog, [histories[user] for user in some], targets[some])


async def rankings(engine: Engine, task: Task, case: Case) -> tuple[list[list[int]], int]:
    """Each user's list as rows of movies, and the rows that the network decodes for a request."""
    item_ids = np.array([movie.item_id for movie in task.log.movies])
    row_of = {item_id: row for row, item_id in enumerate(item_ids.tolist())}
    gate, rows, params = asyncio.Semaphore(CONCURRENCY), 0, case.params()

    async def rank(history: np.ndarray) -> list[int]:
        nonlocal rows
        async with gate:
            answer = await engine.recommend(
                history=item_ids[history].tolist(), n=case.n, exclude_history=True, params=params
            )
        rows = max(rows, sum(answer.result.widths[:-1]))
        return [row_of[int(item.id)] for item in answer.items[:LOOKED_AT]]

    return await asyncio.gather(*map(rank, task.histories)), rows


def judge(task: Task, lists: list[list[int]], first_code: list[str]) -> dict[str, float]:
    """Metrics of one case."""
    ranks = metrics.ranks_of(lists, task.histories, task.targets.tolist())
    recall = metrics.recall(ranks, LOOKED_AT)
    codes = [Counter(first_code[row] for row in ranked) for ranked in lists]
    return {
        "recall@10": recall,
        "standard_error": math.sqrt(recall * (1 - recall) / len(ranks)),
        "ndcg@10": metrics.ndcg(ranks, LOOKED_AT),
        "first_codes": float(np.mean([len(counts) for counts in codes])),
        "entropy": float(np.mean([entropy(counts) for counts in codes])),
        "coverage": len({row for ranked in lists for row in ranked}) / len(task.log.movies),
        "items": float(np.mean([len(ranked) for ranked in lists])),
    }


def entropy(counts: Counter[str]) -> float:
    """Bits."""
    share = np.array(list(counts.values())) / counts.total()
    return float(-(share * np.log2(share)).sum())


async def measure(task: Task, cases: list[Case], **settings: Any) -> list[dict[str, Any]]:
    """All cases, one after another, in one engine."""
    sids = movie_catalog.read_sids(EXAMPLE / "sids.csv")
    first_code = [sids[movie.item_id][0] for movie in task.log.movies]
    results = []
    async with Engine(str(EXAMPLE / "checkpoint"), catalog=str(task.catalog), **settings) as engine:
        await rankings(engine, task, Case("fixed", LOOKED_AT))
        for case in cases:
            before = time.process_time()
            lists, rows = await rankings(engine, task, case)
            cpu_ms = (time.process_time() - before) * 1e3 / len(lists)
            result = {"policy": case.policy, "width": case.width, "with": case.name}
            results.append(result | judge(task, lists, first_code) | {"rows": rows, "cpu_ms": cpu_ms})
            print(f"{case.policy:14}{case.width:5}  {case.name:20}  {results[-1]['recall@10']:.4f}", flush=True)
    return results


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Recall against diversity, and against the rows that the network decodes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    panels = (
        ("first_codes", "distinct first codes among ten", ("diverse", "stochastic"), "with"),
        ("rows", "rows decoded for a request", ("fixed",), "width"),
    )
    for axis, (column, label, named, by) in zip(axes, panels, strict=True):
        for policy in dict.fromkeys(result["policy"] for result in results):
            some = [result for result in results if result["policy"] == policy]
            axis.scatter([one[column] for one in some], [one["recall@10"] for one in some], label=policy, s=26)
            for one in some if policy in named else ():
                if policy != "diverse" or one["width"] == 64:
                    text = "n 10" if one[by] == "-" else one[by]
                    at = (one[column], one["recall@10"])
                    axis.annotate(text, at, fontsize=8, xytext=(4, 4), textcoords="offset points")
        axis.set(xlabel=label, ylabel="Recall@10")
        axis.grid(alpha=0.3)
    axes[1].set_ylim(0.14, 0.21)
    axes[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, help="so many, spread evenly; all by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pip-args", type=shlex.split, default=[], help="further options of `pip download`")
    parser.add_argument("--machine", help="what to call this machine in the report")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG; needs matplotlib (extra `bench`)")
    arguments = parser.parse_args()
    data.fetch(pip_args=arguments.pip_args)
    with tempfile.TemporaryDirectory() as folder:
        task = Task.load(Path(folder), arguments.users)
        results = asyncio.run(measure(task, CASES, device=arguments.device))
    markdown = table(
        ("policy", "width", "with", *COLUMNS),
        [(one["policy"], one["width"], one["with"], *(one[column] for column in COLUMNS)) for one in results],
    )
    print(markdown)
    report = header(arguments)
    if arguments.machine:
        report["machine"] = arguments.machine
    save(arguments.save, report | {"users": len(task.histories), "results": results}, markdown)
    if arguments.plot is not None:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
