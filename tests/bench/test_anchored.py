"""bench/anchored.py counts what a cache of pages would; and docs/history.md shows what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import anchored
import numpy as np
import pytest
import quality

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (5, 30, 90)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> quality.data.Log:
    """Made-up users who watch movies of the example at random, none twice; taken for MovieLens."""
    rng, sids = np.random.default_rng(3), quality.movie_catalog.read_sids(quality.EXAMPLE / "sids.csv")
    movies = [quality.data.Movie(item_id, f"Movie {item_id}", "1990", []) for item_id in sids]
    histories = [rng.permutation(len(movies))[:length] for length in LENGTHS]
    made = quality.data.Log(movies, ["1", "2", "3"], histories, [np.arange(length) for length in LENGTHS])
    monkeypatch.setattr(quality.data, "load", lambda: made)
    return made


def cached(prompts: list[list[int]], page: int) -> int:
    """Tokens found in a cache that keeps every whole page with all that stands before it."""
    pages: set[tuple[int, ...]] = set()
    found = 0
    for prompt in prompts:
        ends = range(page, len(prompt) + 1, page)
        for end in ends:
            if end == len(prompt) or tuple(prompt[:end]) not in pages:
                break
            found += page
        pages.update(tuple(prompt[:end]) for end in ends)
    return found


def test_reuse_is_that_of_a_cache_of_pages(log: quality.data.Log) -> None:
    """For a window that slides and one that moves every 4 events, over pages that are and are not whole items."""
    prefix, sids = [7], [[10 + 3 * row, 11 + 3 * row, 12 + 3 * row] for row in range(len(log.movies))]

    def render(rows: list[int]) -> np.ndarray:
        return np.array([*prefix, *(token for row in rows for token in sids[row])])

    histories = [history.tolist() for history in log.histories]
    results = anchored.replay(histories, render, [(10, 1), (10, 4)], [1, 3], [3, 4])
    assert [(one["block"], one["every"]) for one in results] == [(1, 1), (1, 3), (4, 1), (4, 3)]
    for one in results:
        tokens, found, visits = 0, {3: 0, 4: 0}, 0
        for history in histories:
            counts = range(one["every"], len(history) + 1, one["every"])
            starts = [next(s for s in range(0, count + 1, one["block"]) if count - s <= 10) for count in counts]
            prompts = [render(history[start:count]).tolist() for start, count in zip(starts, counts, strict=True)]
            tokens, visits = tokens + sum(map(len, prompts)), visits + len(prompts)
            found = {page: found[page] + cached(prompts, page) for page in found}
        assert one["visits"] == visits
        for page, count in found.items():
            assert one[f"reused_{page}"] == pytest.approx(count / tokens)
    sliding, _, block, _ = results
    assert sliding["reused_4_past"] == 0 < 0.4 < block["reused_4_past"]
    assert sliding["kept_past"] == 1 and block["kept_past"] == pytest.approx(0.85, abs=0.01)


def test_a_prompt_that_did_not_change_still_computes_its_last_token() -> None:
    prompt = np.arange(32)
    assert anchored.reusable(prompt, prompt, np.array([8, 16, 31])).tolist() == [24, 16, 31]
    assert anchored.reusable(None, prompt, np.array([8])).tolist() == [0]


async def test_a_block_of_one_is_judged_as_the_template_cuts(log: quality.data.Log, tmp_path: Path) -> None:
    """The tenth movie after whole histories, which the template cuts, is the tenth in that case alone."""
    task = quality.Task.load(tmp_path, None)
    async with quality.Engine(str(quality.EXAMPLE / "checkpoint"), catalog=str(task.catalog)) as engine:
        lists, _ = await quality.rankings(engine, task, quality.Case("fixed", 64))
    task.targets = np.array([ranked[9] for ranked in lists])
    found = await anchored.judged(task, [1, 64])
    assert found[0]["recall@10"] == 1 and found[0]["ndcg@10"] == pytest.approx(1 / math.log2(11))
    assert abs(found[1]["ndcg@10"] - found[0]["ndcg@10"]) > 0.01
    assert [one["events"] for one in found] == [pytest.approx((4 + 29 + kept) / 3) for kept in (64, 89 - 64)]


def test_everything_is_measured(log: quality.data.Log, capsys: pytest.CaptureFixture[str]) -> None:
    made = anchored.run(anchored.options().parse_args(["--windows", "4", "40", "--every", "1", "5"]))
    assert [(one["window"], one["block"]) for one in made["reuse"][::2]] == [
        *((4, block) for block in (1, 2, 4)),
        *((40, block) for block in (1, 4, 10, 20, 40)),
    ]
    assert [one["block"] for one in made["quality"]] == list(anchored.QUALITY_BLOCKS)
    assert anchored.markdown(made).count("\n| ") == len(made["reuse"]) + len(made["quality"]) + 1


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]


def test_the_document_shows_what_was_measured() -> None:
    report: dict[str, Any] = json.loads(sorted((ROOT / "bench" / "results").glob("*-anchored.json"))[-1].read_text())
    measured = {(one["window"], one["block"], one["every"]): one for one in report["reuse"]}
    reuse, judged = (ROOT / "docs" / "history.md").read_text().split("\n## Measured\n")[1].split("\n### Quality\n")
    expected = [
        [
            str(window), str(block), format(measured[window, block, 1]["kept_past"], ".0%"),
            *(
                format(measured[window, block, every][f"reused_{page}_past"], ".0%")
                for every in (1, 5, 20)
                for page in (16, 64)
            ),
        ]
        for window, block, every in measured if every == 1
    ]  # fmt: skip
    assert rows_of(reuse) == expected
    assert rows_of(judged) == [
        [str(one["block"]), f"{one['events']:.1f}", f"{one['recall@10']:.4f}", f"{one['ndcg@10']:.4f}"]
        for one in report["quality"]
    ]
