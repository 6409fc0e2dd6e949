"""MovieLens-100K: fetched when needed, parsed, and split into training, validation and test.

GroupLens allows research use and forbids redistribution, so no part of the data is in this repository. The wheel
`recbole==1.2.1` carries it; the wheel is downloaded, two files are taken out, and it is never installed.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
WHEEL = "recbole==1.2.1"
MEMBERS = "recbole/dataset_example/ml-100k/"
LOG_FILE, MOVIE_FILE = "ml-100k.inter", "ml-100k.item"
LOG_COLUMNS = ["user_id:token", "item_id:token", "rating:float", "timestamp:float"]
MOVIE_COLUMNS = ["item_id:token", "movie_title:token_seq", "release_year:token", "class:token_seq"]


@dataclass(frozen=True)
class Movie:
    """One line of the item file."""

    item_id: int
    title: str
    year: str
    genres: list[str]


@dataclass(frozen=True)
class Log:
    """Who watched what, in which order. Histories hold rows of `movies`, oldest first."""

    movies: list[Movie]
    users: list[str]
    histories: list[np.ndarray]
    """int64 [events of the user] each."""
    times: list[np.ndarray]
    """Unix seconds of each event, not decreasing."""

    def train(self) -> list[np.ndarray]:
        """Everything that may be learnt from: each history without its last two events."""
        return [history[:-2] for history in self.histories]

    def validation(self) -> tuple[list[np.ndarray], np.ndarray]:
        """(history, the event after it): the last but one event is the target."""
        return self.train(), np.array([history[-2] for history in self.histories])

    def test(self) -> tuple[list[np.ndarray], np.ndarray]:
        """(history, the event after it): the last event is the target, all before it are known."""
        return [history[:-1] for history in self.histories], np.array([history[-1] for history in self.histories])


def fetch(folder: Path = DATA, pip_args: Sequence[str] = ()) -> Path:
    """Make sure that the two data files lie in `folder`; downloads the wheel with pip if they do not.

    pip's own configuration and environment apply; `pip_args` are further options of `pip download`.
    """
    if (folder / LOG_FILE).exists() and (folder / MOVIE_FILE).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *pip_args, WHEEL]
    print(f"fetching MovieLens-100K from the wheel {WHEEL} ..", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"could not download {WHEEL}, which carries MovieLens-100K:\n{done.stderr.strip()}")
    wheel = next(folder.glob("recbole-1.2.1-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        for name in (LOG_FILE, MOVIE_FILE):
            (folder / name).write_bytes(archive.read(MEMBERS + name))
    wheel.unlink()
    return folder


def load(folder: Path = DATA) -> Log:
    """Parse the two files. Events of a user are sorted by time, equal times by their line in the file."""
    movies = [
        Movie(int(item_id), title, year, genres.split())
        for item_id, title, year, genres in _rows(folder / MOVIE_FILE, MOVIE_COLUMNS)
    ]
    row_of = {movie.item_id: row for row, movie in enumerate(movies)}
    events: dict[str, list[tuple[float, int]]] = {}
    for line, (user, item_id, _, time) in enumerate(_rows(folder / LOG_FILE, LOG_COLUMNS), start=2):
        if int(item_id) not in row_of:
            raise ValueError(f"{LOG_FILE} line {line}: item {item_id} is not in {MOVIE_FILE}")
        events.setdefault(user, []).append((float(time), row_of[int(item_id)]))
    users = sorted(events, key=lambda user: (len(user), user))
    for user in users:
        if len(events[user]) < 3:
            raise ValueError(f"user {user} has {len(events[user])} events; leave-one-out needs at least 3")
        events[user].sort(key=lambda event: event[0])  # a stable sort: equal times stay in file order
    return Log(
        movies,
        users,
        [np.array([row for _, row in events[user]]) for user in users],
        [np.array([time for time, _ in events[user]]) for user in users],
    )


def _rows(path: Path, columns: list[str]) -> list[list[str]]:
    """The lines of a tab-separated file below its header."""
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    if header.split("\t") != columns:
        raise ValueError(f"{path.name}: expected the columns {columns}, found {header.split(chr(9))}")
    rows = [line.split("\t") for line in lines]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(columns):
            raise ValueError(f"{path.name} line {number}: {len(row)} fields instead of {len(columns)}")
    return rows
