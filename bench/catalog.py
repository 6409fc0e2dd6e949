"""Catalogs from ten thousand to fifty million items: building, memory, legality a level, filters, updates.

    python bench/catalog.py [CHECKPOINT] [--sizes 10k 1m 10m 50m] [--save FILE.json]

SIDs are uniform, 3 x 8192 codes by default. For each size: the index is built from arrays, put on the device, and the
levels behind the first one are timed at each width, beside two other ways (gathering.py), with and without filters;
and sizes up to --load are read from a parquet file. `skewed` is a catalog in which one first code has 8192 children
and 8191 others have one each. Times of levels are the device's own, over buffers that exceed its cache; without a GPU
they are the host's, uncompiled. With a CHECKPOINT, an engine serves the largest size up to --load (swaps.py).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from gathering import DictTrie, edges, level_costs, on_device, prefixes_of, shares, top_then_filter_ms
from random_catalog import make_catalog, random_sids, skewed_sids, write_catalog
from report import header, save, table
from swaps import filters_of, serve
from timing import CUDA

from widebeam.constraints.arena import MASK_BYTES, DeviceTrie, device_bytes
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filter_spec import Filters, Predicate
from widebeam.constraints.filters import ItemMask, allowed_items
from widebeam.model.config import load_model_config

T = TypeVar("T")
UNITS = {"k": 10**3, "m": 10**6}
QWEN_VOCAB = 151_669
"""Tokens before those of SIDs, where no checkpoint says otherwise."""
DICT_ITEMS = 1_000_000
"""Python's dictionaries of more take minutes and gigabytes."""
FILTERED_ROWS = 1024
UNCOMPILED = " Times of levels are single uncompiled runs on this host, and say little."
MIB = 1 << 20


def number(text: str) -> int:
    """`10k`, `1m` or digits."""
    unit = UNITS.get(text[-1:].lower(), 1)
    return int(float(text[:-1]) * unit) if unit > 1 else int(text)


def timed(function: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    made = function()
    return time.perf_counter() - started, made


def measure(name: str, arguments: argparse.Namespace, first_token: int) -> dict[str, Any]:
    """Everything about one catalog that needs no network."""
    codes, levels, skewed = arguments.codes, arguments.levels, name == "skewed"
    sids = skewed_sids(codes) if skewed else random_sids(number(name), levels, codes)
    build_s, catalog = timed(lambda: make_catalog(sids, codes, first_token))
    trie = on_device(catalog)
    found: dict[str, Any] = {
        "items": catalog.num_items,
        "nodes": catalog.index.num_nodes,
        "build_s": build_s,
        "ids_s": timed(lambda: catalog.rows_of([0]))[0],
        "load_s": None if skewed or number(name) > arguments.load else load_s(name, arguments, first_token),
        "host_bytes": catalog.index.nbytes + sum(a.nbytes for a in (catalog._codes, catalog._order, catalog._rank)),
        "device_bytes": device_bytes(catalog),
        "mask_bytes": arguments.masks * ItemMask.places_for(catalog.num_items) * MASK_BYTES,
    }
    edge_E = edges(catalog, codes)
    found["levels"] = [
        level_costs(catalog, trie, level, rows, codes)
        | {"top_then_filter_ms": top_then_filter_ms(catalog, level, rows, codes, edge_E)}
        for level in range(1, catalog.depth)
        for rows in arguments.rows
    ]
    found["shares"] = [shares(catalog, trie, width, codes, edge_E) for width in arguments.rows]
    if len(sids) <= DICT_ITEMS:
        found["dictionary_build_s"] = add_dictionary(found["levels"], catalog, sids, first_token, codes)
    found["filters"] = {} if skewed else filters(catalog, trie, min(FILTERED_ROWS, max(arguments.rows)), codes)
    return found


def load_s(name: str, arguments: argparse.Namespace, first_token: int) -> float:
    """Seconds to read, check and index a parquet file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.parquet"
        write_catalog(path, number(name), arguments.levels, arguments.codes, first_token)
        return timed(lambda: Catalog.load(path))[0]


def add_dictionary(costs: list[dict[str, Any]], catalog: Catalog, sids: Any, first_token: int, codes: int) -> float:
    """The milliseconds of a dense mask beside each of the costs; returns the seconds to build the dictionaries."""
    starts = [first_token + level * codes for level in range(catalog.depth)]
    peer = DictTrie(sids, starts, first_token + catalog.depth * codes)
    for cost in costs:
        cost["dictionary_ms"] = peer.apply_ms(prefixes_of(catalog, cost["level"], cost["rows"]))
    return peer.build_s


def filters(catalog: Catalog, trie: DeviceTrie, rows: int, codes: int) -> dict[str, Any]:
    """By kind: milliseconds to find the items, anew and again, and of each level."""
    found: dict[str, Any] = {}
    for name, given in filters_of(catalog.num_items).items():
        first_ms, again_ms, mask = (None, None, None) if given is None else mask_costs(catalog, given)
        costs = [level_costs(catalog, trie, level, rows, codes, mask) for level in range(1, catalog.depth)]
        found[name] = {
            "mask_first_ms": first_ms,
            "mask_again_ms": again_ms,
            "rows": rows,
            "gathering_ms": [cost["gathering_ms"] for cost in costs],
        }
    return found


def mask_costs(catalog: Catalog, given: Filters) -> tuple[float, float, ItemMask]:
    """Milliseconds of a filter whose condition is new, the median of further ones, and the mask."""
    first_s, (mask, _) = timed(lambda: allowed_items(catalog, given))
    again = [timed(lambda: allowed_items(catalog, given))[0] for _ in range(3)]
    return first_s * 1e3, median(again) * 1e3, mask


def warm_up(catalog: Catalog, codes: int) -> None:
    """What is made once is made before it counts: compiled functions with and without filters, Arrow's threads."""
    trie = on_device(catalog)
    group = Predicate(column="group", op="==", value=0)
    mask, _ = allowed_items(catalog, Filters(where=(group,)))
    for given in (None, mask):
        for rows in (16, 32):
            level_costs(catalog, trie, 1, rows, codes, given)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All sizes, then the engine."""
    codes, levels, load = arguments.codes, arguments.levels, os.getloadavg()[0]
    first_token = QWEN_VOCAB
    if arguments.checkpoint is not None:
        first_token = load_model_config(arguments.checkpoint).vocab_size - levels * codes
    warm_up(make_catalog(random_sids(1000, levels, codes), codes, first_token), codes)
    catalogs: dict[str, Any] = {}
    for name in [*arguments.sizes, "skewed"]:
        seconds, catalogs[name] = timed(lambda name=name: measure(name, arguments, first_token))  # type: ignore[misc]
        print(f"{name}: {seconds:.1f} s", flush=True)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
    report = header(arguments) | {"cores": os.cpu_count(), "load_before": load, "catalogs": catalogs}
    served = [size for size in map(number, arguments.sizes) if size <= arguments.load]
    if arguments.checkpoint is not None and served:
        save(arguments.save, report, markdown(report))  # an engine can fail in more ways
        report["engine"] = asyncio.run(serve(arguments, max(served), codes, levels, first_token))
    return report


def markdown(report: dict[str, Any]) -> str:
    """Tables of building, levels, shares, filters and the engine."""
    catalogs = report["catalogs"]
    built = [
        [name, one["items"], one["nodes"], one["build_s"], one["ids_s"], one["load_s"], one.get("dictionary_build_s"),
         one["host_bytes"] / MIB, one["device_bytes"] / MIB, one["mask_bytes"] / MIB]
        for name, one in catalogs.items()
    ]  # fmt: skip
    levels = [
        [name, cost["level"], cost["rows"], cost["children"], cost["slots"], cost["gathering_ms"],
         cost["with_selection_ms"], cost.get("dictionary_ms"), cost["top_then_filter_ms"]]
        for name, one in catalogs.items()
        for cost in one["levels"]
    ]  # fmt: skip
    found = [
        [name, share["width"], share["exact"], share["top_then_filter"]]
        for name, one in catalogs.items()
        for share in one["shares"]
    ]
    filtered = [
        [name, kind, one["mask_first_ms"], one["mask_again_ms"], *one["gathering_ms"]]
        for name, of_one in catalogs.items()
        for kind, one in of_one["filters"].items()
    ]
    head = [
        "catalog",
        "items",
        "nodes",
        "index s",
        "ids s",
        "parquet s",
        "dict s",
        "host MiB",
        "device MiB",
        "masks MiB",
    ]
    cost = ["catalog", "level", "rows", "children", "slots", "ms", "with selection", "dict and mask", "top 2n, filter"]
    deepest = max((len(row) for row in filtered), default=4) - 4
    parts = [
        f"{report['machine']}, {report['date']}; {report['cores']} cores, load {report['load_before']:.1f} beforehand; "
        "milliseconds unless a column says otherwise." + UNCOMPILED * report["machine"].startswith("CPU"),
        table(head, built),
        table(cost, levels),
        "The dictionary's mask comes before selection, so it finds all that exact search finds. Of random logits:",
        table(["catalog", "width", "found by exact search", "share of them by top 2n, filter"], found),
        table(["catalog", "filter", "mask", "mask again", *(f"level {n + 1}" for n in range(deepest))], filtered),
    ]
    return "\n\n".join(parts + (engine_tables(report["engine"]) if "engine" in report else []))


def engine_tables(engine: dict[str, Any]) -> list[str]:
    """Whole searches by filter, and beside updates."""
    searches = [[kind, *one.values()] for kind, one in engine["filters"].items()]
    parts = [
        f"An engine over {engine['items']:,} items, loaded in {engine['load_s']:.1f} s:",
        table(["filter", "whole call", "device", "returned"], searches),
    ]
    updates = engine["updates"]
    changes = [[place, *one.values()] for place, one in enumerate(updates["changes"])]
    loops = [[name, *updates[name].values()] for name in ("quiet", "during")]
    return [
        *parts,
        table(["update", "call s", "first answer s"], changes),
        table(["closed loop of 4", "searches", "p50", "p90", "p99"], loops),
    ]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--sizes", nargs="+", default=["10k", "1m", "10m", "50m"])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024], help="beam widths")
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--codes", type=int, default=8192)
    parser.add_argument("--masks", type=int, default=16, help="filters that a wave has room for: its requests")
    parser.add_argument("--load", type=number, default=10**7, help="most items that are read from a file")
    parser.add_argument("--context", type=int, default=500, help="of the engine's searches")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each closed loop")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--save", type=Path, help="JSON file; its tables go beside it, as .md")
    return parser


if __name__ == "__main__":
    chosen = options().parse_args()
    made = run(chosen)
    print(f"\n{markdown(made)}")
    save(chosen.save, made, markdown(made))
