"""`widebeam serve | generate | catalog | check`: read settings, call one function. Heavy imports wait until needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from widebeam.errors import RequestError, StartupError

USAGE = """usage: widebeam COMMAND ...

  serve MODEL [flags]                      serve a checkpoint over HTTP
  generate MODEL [flags]                   answer one request and print it as JSON
  catalog inspect|validate FILE [flags]    what a catalog file holds, or what is wrong with it
  check [MODEL]                            what this machine can run, and why not more

`widebeam COMMAND --help` lists the flags. Every setting can also come from a TOML file (--config FILE) or from the
environment (WIDEBEAM_MAX_BEAM_WIDTH=256); flags win over the environment, which wins over the file.
"""


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit: 0 fine, 1 the request is wrong, 2 it cannot start or a file is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve,
        "generate": _generate,
        "catalog": _catalog,
        "check": _check,
    }
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(USAGE, end="")
        sys.exit(0)
    if name == "--version":
        from widebeam import __version__

        print(__version__)
        sys.exit(0)
    if name not in commands:
        print(f"widebeam: unknown command {name!r}\n\n{USAGE}", end="", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(commands[name](arguments[1:]))
    except StartupError as error:
        lines = [*getattr(error, "problems", [])] or [str(error)]
        print("\n".join(f"widebeam: {line}" for line in lines), file=sys.stderr)
        sys.exit(2)
    except RequestError as error:
        print(f"widebeam: {error.message}", file=sys.stderr)
        sys.exit(1)


def _serve(arguments: list[str]) -> int:
    from widebeam.config import Config
    from widebeam.http.server import run
    from widebeam.settings import parse

    return run(parse(Config, arguments, "widebeam serve MODEL"))


def _generate(arguments: list[str]) -> int:
    from widebeam.oneshot import Generate, generate
    from widebeam.settings import parse

    print(generate(parse(Generate, arguments, "widebeam generate MODEL")))
    return 0


def _catalog(arguments: list[str]) -> int:
    import tyro

    from widebeam.constraints.catalog import Catalog
    from widebeam.constraints.report import inspect

    if len(arguments) < 2 or arguments[0] not in ("inspect", "validate") or arguments[1].startswith("-"):
        asked = bool({"-h", "--help"}.intersection(arguments))
        usage = "usage: widebeam catalog inspect|validate FILE [--model MODEL]"
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    verb, file, *flags = arguments

    def options(model: str | None = None) -> str | None:
        """Read a catalog file and say what is in it, or every line that is wrong.

        Args:
            model: Folder or Hugging Face id whose tokenizer turns token strings into ids. Without it they are not
                checked against a vocabulary.
        """
        return model

    token_id, vocab_size = _vocabulary(tyro.cli(options, args=flags, prog=f"widebeam catalog {verb} FILE"))
    report = inspect(Catalog.load(Path(file), token_id=token_id, vocab_size=vocab_size))
    if verb == "inspect":
        print(report.text())
    else:
        unchecked = "" if report.resolved else "; token strings were not looked up in a tokenizer (--model)"
        print(f"{file} is fine: {report.items:,} items under {report.sids:,} SIDs{unchecked}")
    return 0


def _vocabulary(model: str | None) -> tuple[Callable[[str], int | None] | None, int | None]:
    """How token strings become ids, and how many ids there are, by a model's folder; nothing without one."""
    if model is None:
        return None, None
    from widebeam.model.config import load_model_config
    from widebeam.model.tokenizer import Tokenizer
    from widebeam.model.weights import resolve_checkpoint

    folder = resolve_checkpoint(model)
    tokenizer = Tokenizer.load(folder)
    return tokenizer.token_id if tokenizer else None, load_model_config(folder).vocab_size


def _check(arguments: list[str]) -> int:
    from widebeam.check import check

    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        asked = bool({"-h", "--help"}.intersection(arguments))
        print("usage: widebeam check [MODEL]", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    print(check(*arguments))
    return 0
