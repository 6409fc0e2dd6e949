"""What `anchored_history` buys: prompt tokens that a returning user's last visit has left in a prefix cache.

    python bench/anchored.py [--every 1 5 20] [--save FILE.json]

MovieLens-100K, all events of every user in order of time, as in examples/movielens/data.py. A visit is a request after
every k-th event of a user. Its prompt is the history, cut, in tokens by the template of the example's catalog. Reused
is what it has in common with the prompt of the user's visit before, in whole pages and without its last token, which
has to be computed in any case: an upper bound, as if nothing were ever evicted. A block of 1 is the plain window of the
newest events. `_past`: of visits after more events than the window holds, the others being the same for every block.
`kept_past`: the events that are left of the window's.

Then Recall@10 and NDCG@10 of the example's model at its own window, for the last movie of every user, all movies
watched left out inside the search.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import quality
from quality import EXAMPLE, LOOKED_AT, data
from report import header, save, table

from widebeam import Catalog, Engine, SearchParams, anchored_history
from widebeam.constraints.filter_spec import Filters
from widebeam.model.tokenizer import Tokenizer

MODEL_WINDOW = 64
"""`max_items` of the example's template, in training and in serving."""
QUALITY_BLOCKS = (1, 4, 8, 16, 32, 64)
PARTS = (10, 4, 2, 1)
"""Blocks are these parts of the window."""


@dataclass
class Tally:
    """Sums over visits."""

    reused: np.ndarray
    """Tokens, for each page size."""
    visits: int = 0
    tokens: int = 0
    events: int = 0

    def add(self, tokens: int, events: int, reused: np.ndarray) -> None:
        self.visits, self.tokens, self.events = self.visits + 1, self.tokens + tokens, self.events + events
        self.reused += reused

    def shares(self) -> list[float]:
        return (self.reused / max(1, self.tokens)).tolist()


def renderer(catalog_file: Path, longest: int) -> Callable[[list[int]], np.ndarray]:
    """From item ids to token ids, as the engine does it; histories of at most `longest` items."""
    tokenizer = Tokenizer(EXAMPLE / "checkpoint")
    catalog = Catalog.load(catalog_file, token_id=tokenizer.token_id, vocab_size=len(tokenizer))
    template = catalog.template
    assert template is not None

    def render(item_ids: list[int]) -> np.ndarray:
        made = template.render(catalog, item_ids, tokenizer.encode, max_tokens=1 + longest * catalog.depth)
        assert made.num_used == len(item_ids)
        return np.array(made.token_ids)

    return render


def common_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if differs.size else shorter


def reusable(before: np.ndarray | None, prompt: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Tokens of a prompt in the whole pages that the visit before has left, for each page size."""
    common = 0 if before is None else min(common_tokens(before, prompt), len(prompt) - 1)
    return common // pages * pages


def replay(
    histories: Sequence[list[int]],
    render: Callable[[list[int]], np.ndarray],
    windows: Sequence[tuple[int, int]],
    everys: Sequence[int],
    pages: Sequence[int],
) -> list[dict[str, Any]]:
    """One result for each (limit, block) and number of events between two visits."""
    sizes, cases = np.array(pages), list(itertools.product(windows, everys))
    tallies = {case: (Tally(0 * sizes), Tally(0 * sizes)) for case in cases}  # all visits, those past the window
    for item_ids in histories:

        @functools.cache
        def prompt_of(start: int, end: int, item_ids: list[int] = item_ids) -> np.ndarray:
            return render(item_ids[start:end])

        for case in cases:
            (limit, block), every = case
            before = None
            for end in range(every, len(item_ids) + 1, every):
                kept = len(anchored_history(range(end), limit, block))
                prompt = prompt_of(end - kept, end)
                reused = reusable(before, prompt, sizes)
                for tally in tallies[case][: 2 if end > limit else 1]:
                    tally.add(len(prompt), kept, reused)
                before = prompt
    return [result(*case, *tallies[case], pages) for case in cases]


def result(window: tuple[int, int], every: int, whole: Tally, past: Tally, pages: Sequence[int]) -> dict[str, Any]:
    limit, block = window
    shares = {
        f"reused_{page}{ending}": share
        for tally, ending in ((whole, ""), (past, "_past"))
        for page, share in zip(pages, tally.shares(), strict=True)
    }
    return {
        "window": limit, "block": block, "every": every, "visits": whole.visits, "visits_past": past.visits,
        "kept_past": past.events / max(1, past.visits * limit), **shares,
    }  # fmt: skip


async def judged(task: quality.Task, blocks: Sequence[int], **settings: Any) -> list[dict[str, Any]]:
    """The example's model on histories cut in blocks; one result each."""
    item_ids = np.array([movie.item_id for movie in task.log.movies])
    row_of = {item_id: row for row, item_id in enumerate(item_ids.tolist())}
    gate, results = asyncio.Semaphore(quality.CONCURRENCY), []
    sids = quality.movie_catalog.read_sids(EXAMPLE / "sids.csv")
    async with Engine(str(EXAMPLE / "checkpoint"), catalog=str(task.catalog), **settings) as engine:

        async def rank(watched: list[int], block: int) -> tuple[list[int], int]:
            """The list as rows of movies, and how many events it was made from."""
            history = anchored_history(watched, MODEL_WINDOW, block)
            params = SearchParams(beam_width=64, filters=Filters(deny=tuple(watched)))
            async with gate:
                answer = await engine.recommend(history=history, n=LOOKED_AT, params=params)
            return [row_of[int(item.id)] for item in answer.items], len(history)

        for block in blocks:
            ranked = await asyncio.gather(*(rank(item_ids[rows].tolist(), block) for rows in task.histories))
            found = quality.judge(task, [rows for rows, _ in ranked], [sids[item][0] for item in item_ids.tolist()])
            kept = float(np.mean([events for _, events in ranked]))
            shown = {name: found[name] for name in ("recall@10", "standard_error", "ndcg@10")}
            results.append({"window": MODEL_WINDOW, "block": block, "events": kept, **shown})
    return results


def blocks_of(window: int) -> list[int]:
    return sorted({1, *(max(1, window // part) for part in PARTS)})


def markdown(report: dict[str, Any]) -> str:
    both = ("reuse", "quality")
    return "\n\n".join(table(list(report[part][0]), (one.values() for one in report[part])) for part in both)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    windows = [(window, block) for window in arguments.windows for block in blocks_of(window)]
    with tempfile.TemporaryDirectory() as folder:
        task = quality.Task.load(Path(folder), None)
        longest = max(arguments.windows)
        wide = Path(folder) / "wide"
        wide.mkdir()
        sids = quality.movie_catalog.read_sids(EXAMPLE / "sids.csv")
        render = renderer(quality.movie_catalog.write_catalog(wide, task.log.movies, sids, longest), longest)
        histories = [[task.log.movies[row].item_id for row in history] for history in task.log.histories]
        reuse = replay(histories, render, windows, arguments.every, arguments.pages)
        found = asyncio.run(judged(task, QUALITY_BLOCKS, device=arguments.device))
    return header(arguments) | {"users": len(histories), "reuse": reuse, "quality": found}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, nargs="+", default=[20, 50, 100, 200], help="events, at most")
    parser.add_argument("--every", type=int, nargs="+", default=[1, 5, 20], help="events between two visits")
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 64], help="tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pip-args", type=shlex.split, default=[], help="further options of `pip download`")
    parser.add_argument("--save", type=Path)
    return parser


def main() -> None:
    arguments = options().parse_args()
    data.fetch(pip_args=arguments.pip_args)
    report = run(arguments)
    print(markdown(report))
    save(arguments.save, report, markdown(report))


if __name__ == "__main__":
    main()
