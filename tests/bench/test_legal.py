"""bench/legal.py on a tiny model: it counts what is wrong, and finds nothing."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import legal


def test_no_illegal_sequence_comes_back(checkpoint: Path) -> None:
    chosen = legal.options().parse_args(
        [str(checkpoint), "--sequences", "3000", "--items", "500", "--max-width", "128"]
    )
    made = asyncio.run(legal.run(chosen))
    assert sum(made["sequences"].values()) >= 3000 and len(made["sequences"]) == 5
    assert (made["illegal"], made["repeated"], made["misordered"]) == (0, 0, 0)


def test_what_is_wrong_is_counted() -> None:
    tally = legal.Tally()
    sequence = argparse.Namespace(token_ids=[1, 2], score=-1.0)
    worse = argparse.Namespace(token_ids=[3, 4], score=-2.0)
    result: Any = argparse.Namespace(sequences=[worse, sequence, sequence])
    tally.add("a", result, {(1, 2)})
    assert (tally.illegal, tally.repeated, tally.misordered) == (1, 1, 1)
    assert tally.sequences["a"] == 3
