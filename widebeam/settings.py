"""Where settings come from: defaults < TOML file < WIDEBEAM_* environment < flags. Only the command line needs this."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, Union, get_args

import msgspec
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from widebeam.config import ALIASES, API_KEY_VARIABLE, ELSEWHERE, EngineConfig, ServerConfig, convert
from widebeam.errors import ConfigError
from widebeam.faults import find_fault, names_meant, question
from widebeam.reference import flags_text, help_text

ENVIRONMENT = "WIDEBEAM_"
SECTIONS: dict[str, type[msgspec.Struct]] = {"engine": EngineConfig, "server": ServerConfig}

T = TypeVar("T", bound=msgspec.Struct)


def parse(
    kind: type[T],
    arguments: list[str],
    prog: str,
    environment: Mapping[str, str] = os.environ,
    unused: tuple[str, ...] = (),
) -> T:
    """A settings tree from flags over the environment over a TOML file. Raises ConfigError; --help exits.

    The first argument, unless it is a flag, is the model. `unused`: sections that the command takes and ignores.
    """
    if not {"-h", "--help"}.isdisjoint(arguments):
        print(help_text(kind, prog, unused), end="")
        sys.exit(0)
    flags = _gathered([_canonical(argument) for argument in arguments], "--catalog")
    if flags and not flags[0].startswith("-"):
        if any(flag.partition("=")[0] == "--model" for flag in flags):
            raise ConfigError(f"the model is given twice, as {flags[0]!r} and by --model")
        flags = ["--model", *flags]
    for name in (flag.partition("=")[0] for flag in flags):
        if name in ELSEWHERE:
            raise ConfigError(f"there is no {name} here: {ELSEWHERE[name]}")
    file, flags = _take_config_flag(flags)
    tree: dict[str, Any] = _read_toml(file) if file else {}
    _add_environment(tree, environment)
    tree.setdefault("engine", {}).setdefault("model", "")
    settings = tyro.cli(
        tyro.conf.OmitArgPrefixes[kind],  # type: ignore[valid-type,misc]
        default=convert(tree, kind, lambda place: f"{place} in {file}"),
        args=flags,
        prog=prog,
        config=(tyro.conf.OmitSubcommandPrefixes,),
        registry=_FLAGS,
    )
    checked = convert(msgspec.to_builtins(settings), kind, _flag)
    if not checked.engine.model:
        raise ConfigError(f"no model: {prog}")
    return checked


def parse_flags(kind: type[Any], flags: list[str], prog: str) -> Any:
    """A struct of flags alone, with its bounds checked. Raises ConfigError; --help exits."""
    if not {"-h", "--help"}.isdisjoint(flags):
        print(flags_text(kind, prog), end="")
        sys.exit(0)
    given = tyro.cli(kind, args=[_canonical(flag) for flag in flags], prog=prog, registry=_FLAGS)
    return convert(msgspec.to_builtins(given), kind, _flag)


_FLAGS = ConstructorRegistry()


@_FLAGS.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | UnsupportedTypeAnnotationError | None:
    """A setting that may be absent is given like one that may not: tyro would take and offer the word None as well."""
    kinds = get_args(info.type)
    if NoneType not in kinds:
        return None
    kind: Any = Union[tuple(one for one in kinds if one is not NoneType)]  # noqa: UP007 (of a tuple)
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    if isinstance(spec, UnsupportedTypeAnnotationError):
        return spec
    return replace(
        spec,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["unset"] if value is None else spec.str_from_instance(value),
    )


def _flag(place: str) -> str:
    """The flag of a setting, whatever its section: names are unique over all of them."""
    return "--" + place.rpartition(".")[2].replace("_", "-")


def _canonical(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return ALIASES.get(name, name) + equals + value


def _gathered(flags: list[str], name: str) -> list[str]:
    """The flags, with all values of one that may be given several times behind one of it."""
    values: list[str] = []
    rest: list[str] = []
    into = rest
    for flag in flags:
        if flag == name:
            into = values
        elif flag.startswith(f"{name}="):
            values.append(flag.removeprefix(f"{name}="))
            into = rest
        else:
            into = rest if flag.startswith("-") else into
            into.append(flag)
    return [*rest, name, *values] if values else flags


def _take_config_flag(flags: list[str]) -> tuple[Path | None, list[str]]:
    for place, flag in enumerate(flags):
        if flag.startswith("--config="):
            return Path(flag.removeprefix("--config=")), flags[:place] + flags[place + 1 :]
        if flag == "--config":
            if place + 1 == len(flags):
                raise ConfigError("--config needs a file")
            return Path(flags[place + 1]), flags[:place] + flags[place + 2 :]
    return None, flags


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    for name, section in tree.items():
        if not isinstance(section, dict):
            homes = [f"[{home}]" for home, struct in SECTIONS.items() if name in struct.__struct_fields__]
            right = f"belongs into the section {homes[0]}" if homes else f"must be a section, [{name}]"
            raise ConfigError(f"{path}: {name} {right}")
    return tree


def _add_environment(tree: dict[str, Any], environment: Mapping[str, str]) -> None:
    """WIDEBEAM_<FIELD> for every field of the tree; one that names no field is an error, not a silent typo."""
    homes = {
        ENVIRONMENT + field.upper(): (section, field)
        for section, struct in SECTIONS.items()
        for field in struct.__struct_fields__
    }
    for name, value in environment.items():
        if not name.startswith(ENVIRONMENT) or name == API_KEY_VARIABLE:
            continue
        if name not in homes:
            known = [home.removeprefix(ENVIRONMENT) for home in homes]
            meant = [ENVIRONMENT + one for one in names_meant(name.removeprefix(ENVIRONMENT), known)]
            raise ConfigError(f"environment variable {name} is no setting{question(meant)}")
        section, field = homes[name]
        struct = SECTIONS[section]
        kind = next(one.type for one in msgspec.structs.fields(struct) if one.name == field)
        try:
            tree.setdefault(section, {})[field] = msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"environment variable {name} {value!r}: {find_fault(error, kind).words}") from None
