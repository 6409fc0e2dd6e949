"""A `widebeam serve` of the benchmark's own: started, read and stopped. Imports no torch."""

from __future__ import annotations

import asyncio
import platform
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO

import aiohttp

STOP_S = 120.0
"""Time to drain, before it is killed."""


@dataclass
class Server:
    """A process that was ready."""

    pid: int
    url: str
    ready_s: float
    """From the start of the process."""
    exit_status: int | None = None
    """Once it has ended."""


@asynccontextmanager
async def running_server(
    checkpoint: str,
    flags: Sequence[str],
    environment: Mapping[str, str] | None = None,
    stderr: IO[bytes] | None = None,
) -> AsyncIterator[Server]:
    """A server on a free port, ready; it ends with the block. Without an `environment` it has this process's."""
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "widebeam", "serve", checkpoint, "--port", "0", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=stderr, env=environment,
    )  # fmt: skip
    try:
        server = Server(process.pid, await _url(process), time.perf_counter() - started)
        yield server
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            process.terminate()
        exit_status = await _end(process)
    server.exit_status = exit_status


async def _url(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode():
        if line.startswith("ready on "):
            return line.removeprefix("ready on ").strip()
    raise SystemExit(f"the server ended with status {await process.wait()}")


async def _end(process: asyncio.subprocess.Process) -> int:
    try:
        return await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        return await process.wait()


def quiet(flags: Sequence[str]) -> list[str]:
    """Flags of a server under load that logs warnings only, unless they say otherwise: else it has a line for each
    request."""
    chosen = any(flag.startswith("--log-level") for flag in flags)
    return [*flags] if chosen else [*flags, "--log-level", "warning"]


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A benchmark's own options, and what follows `--`: flags of `widebeam serve`."""
    end = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:end]), list(argv[end + 1 :])


async def counts(url: str) -> dict[str, float]:
    """What the server's metrics say of slower ways taken, and of graphs that warm-up had not met."""
    values = await metrics(url)
    return {name: values[f"{name}_total"] for name in ("fallbacks", "late_graphs")}


async def metrics(url: str) -> dict[str, float]:
    """The server's metrics by name, less `widebeam_`, and labels."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    return {name: float(value) for name, value in re.findall(r"^widebeam_(\S+|\S+\{.*\}) (\S+)$", text, re.M)}


def machine() -> str:
    """The GPU's name, or the processor's kind where there is none."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, check=True
        )
        return out.stdout.decode().splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return platform.machine()
