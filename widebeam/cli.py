"""`widebeam serve | generate | catalog | check | plan`: read settings, call one function. Heavy imports wait."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from widebeam.errors import RequestError, StartupError

OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user has said how torch's threads on a CPU share its cores."""

USAGE = """usage: widebeam COMMAND ...

  serve MODEL [flags]                      serve a checkpoint over HTTP
  generate MODEL [flags]                   answer one request and print it as JSON
  catalog build|assign [flags]             semantic IDs from item embeddings, written as a catalog
  catalog inspect|validate FILE [flags]    what a catalog file holds, or what is wrong with it
  check [MODEL]                            what this machine can run, and why not more
  plan --model MODEL [flags]               memory, times and GPUs for a load; needs no GPU

`widebeam COMMAND --help` lists the flags. Every setting can also come from a TOML file (--config FILE) or from the
environment (WIDEBEAM_MAX_BEAM_WIDTH=256); flags win over the environment, which wins over the file.
"""

CHECK_USAGE = """usage: widebeam check [MODEL]

What this machine has of what a fast engine needs, a line each: Python, PyTorch, GPUs, FlashInfer, Triton, a compiler;
and what is missing costs. Then, for each device and type of weights and KV, whether MODEL runs in it, with which
attention, or why not. MODEL is a folder or a Hugging Face id, of which only the JSON files are read; without it the
answer is for a model of Qwen3-1.7B's shape. Nothing is loaded or changed. The exit status is 0 whatever is missing,
2 if MODEL cannot be read."""


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit: 0 fine, 1 the request or the file that it validates is wrong, or nobody reads what is
    printed, 2 it cannot start."""
    _share_cores()
    try:
        try:
            status = _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def _share_cores() -> None:
    """Have OpenMP's threads, from torch's first import on, sleep while they wait for each other. By default they spin:
    where anything else wants the cores, that keeps from running what they wait for."""
    if not any(name in os.environ for name in OPENMP):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _run(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve,
        "generate": _generate,
        "catalog": _catalog,
        "check": _check,
        "plan": _plan,
    }
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if name == "--version":
        from widebeam import __version__

        print(__version__)
        return 0
    if name not in commands:
        print(f"widebeam: unknown command {name!r}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    try:
        return commands[name](arguments[1:])
    except StartupError as error:
        lines = [*getattr(error, "problems", [])] or [str(error)]
        print("\n".join(f"widebeam: {line}" for line in lines), file=sys.stderr)
        return 2
    except RequestError as error:
        print(f"widebeam: {error.message}", file=sys.stderr)
        return 1


def _serve(arguments: list[str]) -> int:
    from widebeam.config import Config
    from widebeam.settings import parse

    config = parse(Config, arguments, "widebeam serve MODEL")
    if config.engine.tensor_parallel_size > 1:
        from widebeam.engine.ranks import torchrun_place

        place = torchrun_place(config.engine)
        if place is not None and place.rank > 0:
            from widebeam.engine.follower import follow_torchrun
            from widebeam.http.logs import configure

            configure(config.server.log_level, config.server.log_format)
            follow_torchrun(config.engine, place)
    from widebeam.http.server import run

    return run(config)


def _generate(arguments: list[str]) -> int:
    from widebeam.oneshot import Generate, generate
    from widebeam.settings import parse

    print(generate(parse(Generate, arguments, "widebeam generate MODEL", unused=("server",))))
    return 0


def _catalog(arguments: list[str]) -> int:
    from widebeam.catalogs import run

    return run(arguments)


def _check(arguments: list[str]) -> int:
    from widebeam.check import check

    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        asked = not {"-h", "--help"}.isdisjoint(arguments)
        print(CHECK_USAGE if asked else CHECK_USAGE.splitlines()[0], file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    print(check(*arguments))
    return 0


def _plan(arguments: list[str]) -> int:
    from widebeam.plan.command import run

    return run(arguments)
