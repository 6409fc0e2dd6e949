"""The whole path on real data: start the server, ask it over HTTP, look at three users, measure it on all 943.

    python examples/movielens/demo.py

Exit status 1 if the served model does not beat the most popular movies.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import baselines
import data
import metrics
import numpy as np
from catalog import read_sids, write_catalog
from tqdm import tqdm

from widebeam.client import AsyncClient, Client

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
BEAM_WIDTH = 64
"""Wide enough that the ten best are those of scoring every movie; no beam is spent on movies already seen."""
CONCURRENCY = 32
RANKED, SHOWN = 10, 8
COLUMN = 46


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="as in `widebeam serve`")
    parser.add_argument("--pip-args", type=shlex.split, default=[], help="further options of `pip download`")
    arguments = parser.parse_args()
    started = time.perf_counter()
    log = data.load(data.fetch(pip_args=arguments.pip_args))
    trained = json.loads((HERE / "metrics.json").read_text())
    max_items = trained["recipe"]["max_items"]
    catalog = write_catalog(data.DATA, log.movies, read_sids(HERE / "sids.csv"), max_items)

    with serving(HERE / "checkpoint", catalog, arguments.device) as url:
        show(log, url, [log.users[0], log.users[len(log.users) // 2], log.users[-1]])
        served = asyncio.run(evaluate(log, url))
    rows = {"WideBeam model, served": served, **baselines.evaluate(log)}
    print(f"\nThe next movie of {len(log.users)} users among {len(log.movies)}; seen ones removed for every method\n")
    print(metrics.table(rows))
    exact = ", ".join(f"{name} {value:.4f}" for name, value in trained["test"]["WideBeam model"].items())
    print(f"\nWith every movie scored instead of searched (metrics.json): {exact}")
    print(f"{time.perf_counter() - started:.0f} s\n\n{how_to_go_on(log, catalog)}")
    return 0 if all(served[name] > value for name, value in rows["most popular"].items()) else 1


@contextlib.contextmanager
def serving(checkpoint: Path, catalog: Path, device: str) -> Iterator[str]:
    """Run `widebeam serve` on a free port; yields its URL once it is ready, and stops it in the end."""
    command = [sys.executable, "-m", "widebeam", "serve", str(checkpoint), "--catalog", str(catalog)]
    command += ["--device", device, "--port", "0", "--log-level", "warning"]
    print("$ widebeam " + " ".join(command[3:]).replace(f"{REPOSITORY}/", ""), flush=True)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            print(line, end="", flush=True)
            if line.startswith("ready on "):
                break
        else:
            raise SystemExit(f"the server ended with status {server.wait()} before it was ready")
        yield line.removeprefix("ready on ").strip()
    finally:
        server.terminate()
        server.communicate()


def how_to_go_on(log: data.Log, catalog: Path) -> str:
    """The commands that serve the same again and ask for the first user."""
    widebeam = Path(sys.executable).with_name("widebeam")
    server, checkpoint, items = map(_shown, (widebeam, HERE / "checkpoint", catalog))
    newest = [log.movies[row].item_id for row in log.histories[0][-3:]]
    body = json.dumps({"history": newest, "exclude_history": True, "n": 3, "fields": ["title"]})
    return (
        f"Serve it yourself:\n  {server} serve {checkpoint} --catalog {items}\n"
        f"and in another terminal:\n  curl -s localhost:8000/v1/recommend -d '{body}'"
    )


def _shown(path: Path) -> str:
    return str(path).removeprefix(f"{REPOSITORY}/")


def show(log: data.Log, url: str, users: list[str]) -> None:
    """What users watched last, beside what is recommended to them."""
    with Client(url) as client:
        for user in users:
            *watched, held_out = log.histories[log.users.index(user)].tolist()
            item_ids = [log.movies[row].item_id for row in watched]
            answer = client.recommend(
                history=item_ids, n=SHOWN, beam_width=BEAM_WIDTH, exclude_history=True, fields=["title", "year"]
            )
            left = [f"{log.movies[row].title} ({log.movies[row].year})" for row in reversed(watched[-SHOWN:])]
            right = [f"{item.metadata['title']} ({item.metadata['year']})" for item in answer.items]
            hits = [item.id == log.movies[held_out].item_id for item in answer.items]
            print(f"\nUser {user}, {len(watched)} movies, answered in {answer.timing_ms.total:.0f} ms")
            print(f"  {'watched, newest first':<{COLUMN}}  recommended")
            for one, two, hit in zip(left, right, hits, strict=False):
                one, two = (textwrap.shorten(title, COLUMN - 2, placeholder="..") for title in (one, two))
                print(f"  {one:<{COLUMN}}  {two}{'   <- watched next' if hit else ''}")
            print(f"  {'then watched:':>{COLUMN}}  {log.movies[held_out].title} ({log.movies[held_out].year})")


async def evaluate(log: data.Log, url: str) -> dict[str, float]:
    """Recall@10 and NDCG@10 of the served model on every user's last movie."""
    histories, targets = log.test()
    item_ids = np.array([movie.item_id for movie in log.movies])
    row_of = {item_id: row for row, item_id in enumerate(item_ids.tolist())}
    gate = asyncio.Semaphore(CONCURRENCY)
    print()
    with tqdm(total=len(histories), desc="asking for all users", unit="request") as bar:
        async with AsyncClient(url, timeout=120.0) as client:

            async def rank(history: np.ndarray) -> list[int]:
                async with gate:
                    answer = await client.recommend(
                        history=item_ids[history].tolist(), n=RANKED, beam_width=BEAM_WIDTH, exclude_history=True
                    )
                bar.update()
                return [row_of[item.id] for item in answer.items]

            rankings = await asyncio.gather(*map(rank, histories))
    return metrics.summary(metrics.ranks_of(rankings, histories, targets))


if __name__ == "__main__":
    raise SystemExit(main())
