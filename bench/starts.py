"""Seconds from the start of a server's process until it is ready, without and with what an earlier start has left.

    python bench/starts.py CHECKPOINT [--warmup fast full] [--save FILE.json] [-- serve flags]

For each --warmup, `widebeam serve CHECKPOINT` starts twice, with cache folders of its own (TORCHINDUCTOR_CACHE_DIR and
TRITON_CACHE_DIR) that are empty at first and then hold what the first start has compiled. Kernels of FlashInfer are
neither: the first start on a machine builds them, later ones load them. What was loaded, compiled and captured is read
from the server's log; on a CPU nothing is compiled. `fallbacks` and `late_graphs` are read from /metrics once it is
ready. Exit status 1 if a server ended with another status than 0.

`ready s` is all of it, Python's imports and the catalogs' files included. `load s` is all that comes on
the device before the warm-up: attention kernels, weights, rooms, the largest waves and pools. `kernels s` is the part
of it in which FlashInfer's kernels are built or loaded and run once: `ready s` less it is a start without their build.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from report import header, origin, save, table
from servers import counts, machine, running_server, split_flags

KERNELS = re.compile(r"FlashInfer's \w+ kernels are there after ([\d.]+) s")
LOADED = re.compile(r"loaded in ([\d.]+) s")
WARMED = re.compile(r"warm-up: (\d+) waves? in ([\d.]+) s, Made\(compiled=(\d+), captured=(\d+), skipped=(\d+)\)")
"""One line for any token, one for larger prompts and those behind prefixes, and one for each catalog; what was made is
counted from the start."""
SHOWN_S = 0.5
"""After which what the server has written is shown."""
COLUMNS = {
    "warmup": "warm-up", "caches": "caches", "ready_s": "ready s", "kernels_s": "kernels s", "load_s": "load s",
    "warmup_s": "warm-up s", "waves": "waves", "compiled": "compiled", "captured": "captured", "skipped": "skipped",
    "fallbacks": "fallbacks", "late_graphs": "late graphs", "cache_mib": "caches MiB",
}  # fmt: skip


def said(log: str) -> dict[str, Any]:
    """What a server's log tells of its start: seconds to load, those of FlashInfer's kernels among them, and to warm
    up, with what that made. None where it says nothing."""
    kernels, loaded = KERNELS.search(log), LOADED.search(log)
    warmed = [found.groups() for found in WARMED.finditer(log)]
    made = map(int, warmed[-1][2:]) if warmed else (None, None, None)
    return {
        "kernels_s": float(kernels[1]) if kernels else None,
        "load_s": float(loaded[1]) if loaded else None,
        "waves": sum(int(waves) for waves, *_ in warmed) if warmed else None,
        "warmup_s": sum(float(seconds) for _, seconds, *_ in warmed) if warmed else None,
        **dict(zip(("compiled", "captured", "skipped"), made, strict=True)),
    }


async def start(arguments: argparse.Namespace, warmup: str, caches: Path, log: IO[bytes]) -> dict[str, Any]:
    """Start one server and stop it."""
    folders = {name: str(caches / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    flags = ["--warmup", warmup, *arguments.serve]
    shown = asyncio.create_task(show(log))
    try:
        async with running_server(arguments.checkpoint, flags, os.environ | folders, log) as server:
            found = {"ready_s": server.ready_s} | await counts(server.url)
    finally:
        await asyncio.sleep(SHOWN_S)
        shown.cancel()
    log.seek(0)
    return found | said(log.read().decode()) | {"cache_mib": size_of(caches) / 2**20, "exit_status": server.exit_status}


async def show(log: IO[bytes]) -> None:
    """Pass on what the server writes: a start may take longer than somebody waits for it."""
    passed = 0
    while True:
        text = os.pread(log.fileno(), 1 << 20, passed)
        passed += len(text)
        print(text.decode(errors="replace"), end="", file=sys.stderr, flush=True)
        await asyncio.sleep(SHOWN_S / 2)


def size_of(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Two starts for each way to warm up, each saved as it is made."""
    for warmup in arguments.warmup:
        with tempfile.TemporaryDirectory() as caches:
            for held in ("empty", "filled"):
                with tempfile.TemporaryFile() as log:
                    found = await start(arguments, warmup, Path(caches), log)
                report["starts"].append({"warmup": warmup, "caches": held} | found)
                save(arguments.save, report, markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """One row for each start."""
    rows = [[start[key] for key in COLUMNS] for start in report["starts"]]
    return f"{origin(report)}\n\n{table(list(COLUMNS.values()), rows)}"


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; what follows `--` is for `widebeam serve`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--warmup", nargs="+", choices=("none", "fast", "full"), default=["fast", "full"])
    parser.add_argument("--save", type=Path, help="JSON file; its table goes beside it, as .md")
    own, serve = split_flags(argv)
    return parser.parse_args(own, argparse.Namespace(serve=serve))


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    report = header(arguments) | {"machine": machine(), "starts": []}
    asyncio.run(measure(arguments, report))
    print(markdown(report))
    return int(any(start["exit_status"] for start in report["starts"]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
