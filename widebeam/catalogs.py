"""`widebeam catalog build | assign | inspect | validate`: flags in, a report or JSON out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from widebeam.errors import ConfigError
from widebeam.faults import counted
from widebeam.settings import parse_flags

USAGE = """usage: widebeam catalog COMMAND ..

  build --embeddings FILE [flags]                    give items semantic IDs, and write a catalog
  assign --codebooks FOLDER --embeddings FILE        semantic IDs for new items, by an earlier build
  inspect FILE [--model MODEL]                       what a catalog file holds, and what it takes on a GPU
  validate FILE [--model MODEL]                      what is wrong with a catalog file, line by line

`widebeam catalog COMMAND --help` lists the flags."""


class Inspect(msgspec.Struct, frozen=True, kw_only=True):
    """Read a catalog file and say what is in it."""

    model: str | None = None
    """Folder or Hugging Face id of a model, whose tokenizer turns token strings into ids."""
    json: bool = False
    """Print JSON."""


class Validate(msgspec.Struct, frozen=True, kw_only=True):
    """Read a catalog file and name all that is wrong with it. Exit status 1 if anything is."""

    model: str | None = None
    """Folder or Hugging Face id of a model whose tokenizer turns token strings into ids. Without it they are not
    checked against a vocabulary."""
    json: bool = False
    """Print JSON."""


def run(arguments: list[str]) -> int:
    """One command; the exit status."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "build": _build,
        "assign": _assign,
        "inspect": _inspect,
        "validate": _validate,
    }
    name = arguments[0] if arguments else ""
    if name not in commands:
        asked = bool({"-h", "--help"}.intersection(arguments))
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return commands[name](arguments[1:])


def _build(arguments: list[str]) -> int:
    from widebeam.constraints.build import HEADER, ITEMS, Build, build, few_codes

    options: Build = parse_flags(Build, arguments, "widebeam catalog build")
    report = build(options)
    print(report.text())
    print(f"{'written':<9} {Path(options.output) / ITEMS}, with {HEADER}, tokens and codebooks beside it")
    if (warning := few_codes(options, report)) is not None:
        sys.stdout.flush()
        print(f"widebeam: warning: {warning}", file=sys.stderr)
    return 0


def _assign(arguments: list[str]) -> int:
    from widebeam.constraints.assign import Assign, assign, json_lines

    options: Assign = parse_flags(Assign, arguments, "widebeam catalog assign")
    table = assign(options)
    if options.output is not None:
        print(f"{options.output}: {counted(len(table), 'item', ',')}")
        return 0
    for line in json_lines(table):
        print(line)
    return 0


def _inspect(arguments: list[str]) -> int:
    from widebeam.constraints.catalog import Catalog
    from widebeam.constraints.report import inspect

    file, flags = _take_file(arguments, "inspect")
    options: Inspect = parse_flags(Inspect, flags, "widebeam catalog inspect FILE")
    model = _Model(options.model)
    started = time.perf_counter()
    catalog = Catalog.load(file, shown=str(file), token_id=model.token_id, vocab_size=model.vocab_size)
    load_s = time.perf_counter() - started
    report = inspect(catalog, load_s=load_s)
    print(_json(report) if options.json else report.text())
    return 0


def _validate(arguments: list[str]) -> int:
    from widebeam.constraints.validation import validate

    file, flags = _take_file(arguments, "validate")
    options: Validate = parse_flags(Validate, flags, "widebeam catalog validate FILE")
    model = _Model(options.model)
    found = validate(file, model.token_id, model.vocab_size)
    print(_json(found) if options.json else found.text())
    return 0 if found.fine else 1


def _take_file(arguments: list[str], command: str) -> tuple[Path, list[str]]:
    """The file, which comes first, and the flags behind it."""
    if {"-h", "--help"}.intersection(arguments):
        return Path(), ["--help"]
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"no file: widebeam catalog {command} FILE")
    return Path(arguments[0]), arguments[1:]


def _json(report: msgspec.Struct) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


class _Model:
    """What a model's folder says: how token strings become ids, and how many ids there are."""

    def __init__(self, model: str | None) -> None:
        self.token_id: Callable[[str], int | None] | None = None
        self.vocab_size: int | None = None
        if model is None:
            return
        from widebeam.model.config import load_model_config
        from widebeam.model.tokenizer import Tokenizer
        from widebeam.model.weights import resolve_checkpoint

        folder = resolve_checkpoint(model)
        tokenizer = Tokenizer.load(folder)
        self.token_id = tokenizer.token_id if tokenizer else None
        self.vocab_size = load_model_config(folder).vocab_size
