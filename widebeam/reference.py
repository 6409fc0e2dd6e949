"""What `--help` and docs/settings.md say of the settings: read from their structs and the docstrings of their fields.

`python -m widebeam.reference > docs/settings.md` writes the document.
"""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta

from widebeam.config import ALIASES, ELSEWHERE, EngineConfig, ServerConfig

GROUPS = {
    "Model": "model revision device dtype quantization attention_backend max_context_len max_levels",
    "Search": "max_beam_width default_beam_width",
    "Catalogs": "catalog default_catalog catalog_memory_gib filter_memory_gib catalog_history watch_catalogs "
    "watch_interval_s",
    "Memory": "gpu_memory_utilization kv_cache_dtype page_size max_total_tokens beam_kv_tokens",
    "Prefix cache": "prefix_cache prefix_cache_eviction prefix_cache_host_gib check_host_pages",
    "Scheduling": "max_wave_tokens max_wave_rows max_wave_requests max_waiting_requests max_waiting_rows "
    "max_waiting_row_levels max_waiting_tokens hang_timeout_s",
    "Compiling": "enforce_eager warmup warmup_policies",
    "Several GPUs": "tensor_parallel_size",
}
"""The engine's settings by what they are about."""
SOURCES = """\
A setting is a flag (--max-beam-width 256), else an environment variable (WIDEBEAM_MAX_BEAM_WIDTH=256), else a key of a
TOML file (--config FILE: max_beam_width = 256 under [engine]), else it is as given here."""
_INTRODUCTION = """\
# Settings

Of `widebeam serve` and, but for the server's, of `widebeam generate` and `Engine(model, name=value)`. The first
argument of a command is the model. A setting is taken from the first of these that has it:

1. the flag: `--max-beam-width 256`, or `--max-beam-width=256`;
2. the environment variable `WIDEBEAM_` and the name in capitals: `WIDEBEAM_MAX_BEAM_WIDTH=256`;
3. the TOML file of `--config FILE`: the name with underscores, under the section that is named below;
4. its default.

What no setting is called is an error in all of them. `--catalog` takes several files, and may be repeated; vLLM's
`--max-model-len` is `--max-context-len`. A flag of yes and no has a twin: `--watch-catalogs`, `--no-watch-catalogs`.

```toml
[engine]
model = "examples/movielens/checkpoint"
catalog = ["examples/movielens/data/movies.jsonl"]
max_beam_width = 256

[server]
port = 8000
log_format = "json"
```

This page is written by `python -m widebeam.reference > docs/settings.md`, from `widebeam/config.py`.
"""
_MOST_COLUMNS = 100


class Setting(NamedTuple):
    """One field of a settings struct."""

    name: str
    value: str
    """What is given: INT, TEXT, the choices; empty for yes or no."""
    bounds: str
    """In words; empty without any."""
    default: str
    """As it is written; empty if it depends on something, which `meaning` says, or if there is none."""
    meaning: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def settings_of(kind: type[msgspec.Struct]) -> dict[str, Setting]:
    """The fields of a struct by their names, in its order."""
    said = field_docs(kind)
    return {
        field.name: Setting(
            field.name, _value(field.type), _bounds(field.type), _default(field.default), said.get(field.name, "")
        )
        for field in msgspec.structs.fields(kind)
    }


def help_text(kind: type[msgspec.Struct], prog: str, unused: tuple[str, ...] = ()) -> str:
    """`--help` of a command with these settings, without the sections that it does not use."""
    columns = _columns()
    parts = [f"usage: {prog} [flags]", *(_wrapped(text, columns) for text in (inspect.getdoc(kind) or "", SOURCES))]
    for field in msgspec.structs.fields(kind):
        section, struct = field.name, field.type
        if section in unused:
            parts.append(_wrapped(f"Settings of [{section}] are taken and not used: one file may hold all.", columns))
            continue
        parts += [_shown(title, settings, columns) for title, settings in _groups(section, struct)]
    return "\n\n".join(parts) + "\n"


def flags_text(kind: type[msgspec.Struct], prog: str) -> str:
    """`--help` of a command that takes these flags and no other settings."""
    columns, settings = _columns(), settings_of(kind)
    parts = [f"usage: {prog} [flags]", _wrapped(inspect.getdoc(kind) or "", columns)]
    for title, required in (("Required", True), ("Optional", False)):
        named = [settings[field.name] for field in msgspec.structs.fields(kind) if field.required is required]
        parts += [_shown(title, named, columns)] if named else []
    return "\n\n".join(parts) + "\n"


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, _MOST_COLUMNS)


def _shown(title: str, settings: list[Setting], columns: int) -> str:
    """A group of settings, each with what it means below it."""
    lines = [title]
    for one in settings:
        lines.append(f"  {_usage(one)}")
        if told := _told(one):
            lines.append(textwrap.indent(_wrapped(told, columns - 6), " " * 6))
    return "\n".join(lines)


def document() -> str:
    """docs/settings.md."""
    parts = [_INTRODUCTION]
    for section, struct in (("engine", EngineConfig), ("server", ServerConfig)):
        for title, settings in _groups(section, struct):
            rows = ["| flag | default | values | meaning |", "|---|---|---|---|"]
            for one in settings:
                values = ", ".join(filter(None, (one.value.replace("|", ", "), one.bounds))) or "yes or no"
                rows.append(
                    f"| `{one.flag}` | {f'`{one.default}`' if one.default else ''} | {values} | {one.meaning} |"
                )
            parts.append(f"## {title}\n\nSection `[{section}]`.\n\n" + "\n".join(rows) + "\n")
    rows = ["| vLLM, SGLang | here |", "|---|---|", *(f"| `{name}` | {here} |" for name, here in ELSEWHERE.items())]
    parts.append("## Flags of vLLM and SGLang\n\nRefused, with these words.\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _groups(section: str, struct: type[msgspec.Struct]) -> Iterator[tuple[str, list[Setting]]]:
    """(title, settings) in the order in which they are shown."""
    settings = settings_of(struct)
    if struct is not EngineConfig:
        yield section.capitalize(), [*settings.values()]
        return
    for title, names in GROUPS.items():
        yield title, [settings[name] for name in names.split()]


def _usage(setting: Setting) -> str:
    names = [setting.flag, *(alias for alias, flag in ALIASES.items() if flag == setting.flag)]
    if not setting.value:
        names.append(f"--no-{setting.flag.removeprefix('--')}")
    return f"{', '.join(names)} {setting.value}".rstrip()


def _told(setting: Setting) -> str:
    more = [setting.bounds, f"default {setting.default}" if setting.default else ""]
    noted = "; ".join(filter(None, more))
    return f"{setting.meaning} ({noted})".strip() if noted else setting.meaning


def field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field of a struct and its bases, on one line; nothing for a field that has none."""
    bases = [one for one in reversed(kind.__mro__) if one.__module__.startswith(__package__)]
    return {name: text for base in bases for name, text in _own_docs(base).items()}


def _own_docs(kind: type) -> dict[str, str]:
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except OSError:  # installed without its source
        return {}
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }  # fmt: skip


def _plain(kind: Any) -> tuple[Any, Meta]:
    """The type of a value that is given, and its bounds; of several types, the one that can be given many times."""
    if get_origin(kind) in (Union, UnionType):
        members = [one for one in get_args(kind) if one is not NoneType]
        if all(get_origin(one) is Literal for one in members):
            return Literal[tuple(choice for one in members for choice in get_args(one))], Meta()
        return _plain(next((one for one in members if get_origin(one) is tuple), members[0]))
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        return inner, next(note for note in notes if isinstance(note, Meta))
    return kind, Meta()


def _value(kind: Any) -> str:
    plain, _ = _plain(kind)
    if get_origin(plain) is Literal:
        return "|".join(get_args(plain))
    if get_origin(plain) is tuple:
        one = _value(get_args(plain)[0])
        return f"{one} [{one} ..]"
    return {int: "INT", float: "NUMBER", str: "TEXT", bool: ""}[plain]


def _bounds(kind: Any) -> str:
    _, meta = _plain(kind)
    if meta.ge is not None and meta.le is not None:
        return f"{meta.ge} to {meta.le}"
    low = f"above {meta.gt}" if meta.gt is not None else f"at least {meta.ge}" if meta.ge is not None else ""
    high = f"at most {meta.le}" if meta.le is not None else f"below {meta.lt}" if meta.lt is not None else ""
    return ", ".join(filter(None, (low, high)))


def _default(value: Any) -> str:
    if value in (NODEFAULT, None, ()):
        return ""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _wrapped(text: str, columns: int) -> str:
    return textwrap.fill(" ".join(text.split()), columns, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    print(document(), end="")
