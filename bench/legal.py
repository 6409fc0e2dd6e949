"""Is all that is returned in the catalog? Random searches over several catalogs, until N sequences came.

    python bench/legal.py CHECKPOINT --sequences 1000000 [--save FILE.json]

Catalogs: uniform SIDs, a few wide branches beside thousands of narrow ones, mixed depths, all items under one SID, and
a single item; each search has a width, a normaliser, perhaps a width for each level and perhaps a filter of its own,
and several run at once. Each returned sequence is looked up in a Python set of the SIDs that the file was written from,
or of those that the filter allows. Exit status 1 if one is illegal or came twice, or scores do not descend.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from report import header, save, table

from widebeam import Engine
from widebeam.constraints.filter_spec import Filters
from widebeam.engine.request import SearchParams, SearchResult
from widebeam.model.config import load_model_config
from widebeam.policies import PolicySpec

Sid = tuple[int, ...]
CONCURRENCY, LEVELS = 8, 3


def catalogs(items: int, codes: int, rng: np.random.Generator) -> dict[str, list[Sid]]:
    """SIDs as codes, by name; item i has the i-th."""
    drawn = rng.integers(0, codes, (items, LEVELS))
    skewed = np.where(rng.random(items) < 0.9, 0, drawn[:, 0])
    lengths = rng.integers(1, LEVELS + 1, items)
    return {
        "uniform": [tuple(sid) for sid in drawn.tolist()],
        "skewed": [(first, *sid[1:]) for first, sid in zip(skewed.tolist(), drawn.tolist(), strict=True)],
        "mixed": [tuple(sid[:length]) for sid, length in zip(drawn.tolist(), lengths.tolist(), strict=True)],
        "one-sid": [tuple(drawn[0].tolist())] * items,
        "one-item": [tuple(drawn[0].tolist())],
    }


@dataclass
class Tally:
    """What came back so far."""

    sequences: Counter[str] = field(default_factory=Counter)
    searches: Counter[str] = field(default_factory=Counter)
    illegal: int = 0
    repeated: int = 0
    misordered: int = 0

    def add(self, name: str, result: SearchResult, legal: set[Sid]) -> None:
        found = [tuple(sequence.token_ids) for sequence in result.sequences]
        scores = [sequence.score for sequence in result.sequences]
        self.searches[name] += 1
        self.sequences[name] += len(found)
        self.illegal += sum(sid not in legal for sid in found)
        self.repeated += len(found) - len(set(found))
        self.misordered += scores != sorted(scores, reverse=True) or not np.isfinite(scores).all()


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Search until so many sequences were returned."""
    rng = np.random.default_rng(arguments.seed)
    vocab = load_model_config(arguments.checkpoint).vocab_size
    starts = vocab - LEVELS * arguments.codes + np.arange(LEVELS) * arguments.codes
    sids = {
        name: [tuple(code + int(start) for code, start in zip(sid, starts, strict=False)) for sid in of_one]
        for name, of_one in catalogs(arguments.items, arguments.codes, rng).items()
    }
    engine = Engine(
        str(arguments.checkpoint),
        max_beam_width=arguments.max_width,
        max_wave_rows=4 * arguments.max_width,
        warmup="none",
    )
    tally, started = Tally(), time.perf_counter()

    async def searching() -> None:
        while sum(tally.sequences.values()) < arguments.sequences:
            name = str(rng.choice(list(sids)))
            params, allowed = random_search(name, sids[name], arguments.max_width, rng)
            tokens = rng.integers(0, vocab, int(rng.integers(1, 40))).tolist()
            tally.add(name, await engine.submit(tokens, params), {sids[name][item] for item in allowed})

    async with engine:
        with tempfile.TemporaryDirectory() as folder:
            for name, of_one in sids.items():
                path = Path(folder) / f"{name}.parquet"
                pq.write_table(pa.table({"item_id": range(len(of_one)), "sid": [list(sid) for sid in of_one]}), path)
                await engine.load_catalog(path)
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(searching())
    return header(arguments) | {
        "seconds": time.perf_counter() - started,
        "searches": dict(tally.searches),
        "sequences": dict(tally.sequences),
        "illegal": tally.illegal,
        "repeated": tally.repeated,
        "misordered": tally.misordered,
    }


def random_search(
    name: str, sids: list[Sid], max_width: int, rng: np.random.Generator
) -> tuple[SearchParams, np.ndarray]:
    """A search, and the items that it may return."""
    width = int(np.exp(rng.uniform(0, np.log(max_width))))
    widths = [int(w) for w in rng.integers(1, max_width + 1, max(map(len, sids)) - 1)]
    allowed, filters = np.arange(len(sids)), None
    if rng.random() < 0.5:
        allowed = rng.choice(len(sids), int(rng.integers(1, len(sids) + 1)), replace=False)
        filters = Filters(allow=tuple(allowed.tolist()))
    scheduled = PolicySpec(name="scheduled", widths=(*widths, width)) if rng.random() < 0.5 else None
    params = SearchParams(
        n=width,
        beam_width=None if scheduled else width,
        policy=scheduled,
        catalog=name,
        filters=filters,
        normalizer=str(rng.choice(["vocab", "level", "legal"])),  # type: ignore[arg-type]
    )
    return params, allowed


def markdown(report: dict[str, Any]) -> str:
    rows = [[name, report["searches"][name], report["sequences"][name]] for name in report["searches"]]
    total = sum(report["sequences"].values())
    return (
        f"{report['machine']}, {report['date']}: of {total:,} sequences, returned in {report['seconds']:.0f} s, "
        f"{report['illegal']} were illegal, {report['repeated']} came twice; {report['misordered']} answers were out "
        f"of order.\n\n{table(['catalog', 'searches', 'sequences'], rows)}"
    )


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=3000, help="of each catalog")
    parser.add_argument("--codes", type=int, default=16, help="of each of three levels: the last tokens of the model")
    parser.add_argument("--max-width", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="JSON file; its table goes beside it, as .md")
    return parser


def main() -> int:
    arguments = options().parse_args()
    report = asyncio.run(run(arguments))
    print(markdown(report))
    save(arguments.save, report, markdown(report))
    return int(report["illegal"] + report["repeated"] + report["misordered"] > 0)


if __name__ == "__main__":
    sys.exit(main())
