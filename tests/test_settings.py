"""Where settings come from, and what is said of wrong ones."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import msgspec
import pytest

from widebeam.catalogs import Inspect, Validate
from widebeam.config import ELSEWHERE, Config, EngineConfig, ServerConfig
from widebeam.constraints.assign import Assign
from widebeam.constraints.build import Build
from widebeam.constraints.catalogs import catalog_files
from widebeam.errors import ConfigError
from widebeam.oneshot import Generate, Request
from widebeam.plan.command import Plan
from widebeam.reference import settings_of
from widebeam.settings import parse, parse_flags


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "widebeam.toml"
    file.write_text('[engine]\nmodel = "a"\npage_size = 16\nmax_levels = 8\n[server]\nport = 1\n')
    environment = {"WIDEBEAM_PAGE_SIZE": "32", "WIDEBEAM_PORT": "2", "OTHER": "x"}
    config = parse(Config, ["--config", str(file), "--port", "3"], "widebeam serve", environment)
    assert (config.engine.model, config.engine.max_levels) == ("a", 8)
    assert (config.engine.page_size, config.server.port) == (32, 3)
    assert parse(Config, ["b", f"--config={file}"], "widebeam serve", {}).engine.model == "b"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--catalog", "a", "b=c/d.json", "--port", "3"],
        ["--catalog", "a", "--port", "3", "--catalog", "b=c/d.json"],
        ["--catalog=a", "--catalog=b=c/d.json", "--port=3"],
    ],
)
def test_several_catalogs(arguments: list[str], tmp_path: Path) -> None:
    config = parse(Config, ["m", *arguments], "widebeam serve", {})
    assert (config.engine.catalog, config.server.port) == (("a", "b=c/d.json"), 3)
    file = tmp_path / "widebeam.toml"
    file.write_text('[engine]\nmodel = "m"\ncatalog = ["a", "b=c/d.json"]\n')
    assert parse(Config, ["--config", str(file)], "widebeam serve", {}).engine.catalog == ("a", "b=c/d.json")
    assert parse(Config, ["m"], "widebeam serve", {"WIDEBEAM_CATALOG": "b=a"}).engine.catalog == "b=a"


def test_catalogs_have_names() -> None:
    assert catalog_files(("x/a.parquet", "b=c=d.json", "x=y/a.json", "x/y=z.json", "T.index.json")) == {
        "a": "x/a.parquet", "b": "c=d.json", "x": "y/a.json", "y=z": "x/y=z.json", "T": "T.index.json",
    }  # fmt: skip
    uris = ("s3://b/c/a.parquet", "s3://b/T.index.json?endpoint_override=h:1&scheme=http", "n=gs://b/a.pq")
    assert catalog_files(uris) == {"a": uris[0], "T": uris[1], "n": "gs://b/a.pq"}
    assert catalog_files("a.json") == {"a": "a.json"} and catalog_files(None) == catalog_files(()) == {}
    for given, words in (
        (("a.json", "x/a.parquet"), "both be named 'a'"), ("=a", "NAME=FILE"), ("a=", "NAME=FILE"), ("", "NAME=FILE")
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            catalog_files(given)


def test_vllm_spelling() -> None:
    assert parse(Config, ["m", "--max-model-len", "77"], "widebeam serve", {}).engine.max_context_len == 77
    assert parse(Config, ["m", "--max-model-len=77"], "widebeam serve", {}).engine.max_context_len == 77


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["m", "--tp", "2"], {}, "there is no --tp here: --tensor-parallel-size"),
        (["m", "--api-key=secret"], {}, "there is no --api-key here: --api-key-file"),
        (["m", "--page-size", "0"], {}, "--page-size 0: expected int >= 1"),
        (["m", "--port", "99999"], {}, "--port 99999: expected int <= 65535"),
        (["m", "--max-beam-width", "5001"], {}, "--max-beam-width 5001: expected int <= 5000"),
        (["m"], {"WIDEBEAM_PAGESIZE": "3"}, "WIDEBEAM_PAGESIZE is no setting; did you mean 'WIDEBEAM_PAGE_SIZE'"),
        (["m"], {"WIDEBEAM_FOO": "3"}, "WIDEBEAM_FOO is no setting$"),
        (["m"], {"WIDEBEAM_PAGE_SIZE": "many"}, "WIDEBEAM_PAGE_SIZE 'many': expected int, got str"),
        (["m"], {"WIDEBEAM_DTYPE": "int8"}, "'int8' is none of: auto, bfloat16, float16, float32"),
        (["m", "--config", "/nowhere.toml"], {}, "nowhere"),
        (["m", "--config"], {}, "--config"),
        ([], {}, "no model"),
    ],
)
def test_bad_settings_are_named(arguments: list[str], environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(Config, arguments, "widebeam serve", environment)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engine]\npagesize = 16", "there is no engine.pagesize in .*beam.toml; did you mean 'page_size'"),
        ("[sever]\nport = 1", "there is no sever in .*beam.toml; did you mean 'server'"),
        ("[engine]\npage_size = 0", "engine.page_size in .*beam.toml 0: expected int >= 1"),
        ("[server]\nlog_level = 'loud'", "server.log_level in .*beam.toml 'loud': 'loud' is none of: debug, error"),
        ("[server]\nlog_level = ", "beam.toml cannot be read"),
        ("port = 3", r"beam.toml: port belongs into the section \[server\]"),
        ("server = 3", r"beam.toml: server must be a section, \[server\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_named_with_it(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "widebeam.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse(Config, ["m", "--config", str(file)], "widebeam serve", {})


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "widebeam.toml"
    file.write_text("[server]\nport = 1234\n", encoding="utf-8-sig")
    assert parse(Config, ["m", "--config", str(file)], "widebeam serve", {}).server.port == 1234


ABSENT = [
    (kind, field.name)
    for kind in (Generate, Plan, Build, Assign, Inspect, Validate)
    for struct in ((Request, EngineConfig, ServerConfig) if kind is Generate else (kind,))
    for field in msgspec.structs.fields(struct)
    if field.default is None
]


@pytest.mark.parametrize(("kind", "name"), ABSENT)
def test_no_error_about_a_flag_shows_none(
    kind: type[msgspec.Struct], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--" + name.replace("_", "-")
    for flags in ([flag, "?"], [flag], [flag + "x", "1"]):
        with contextlib.suppress(SystemExit):
            if kind is Generate:
                parse(Generate, ["m", *flags], "widebeam generate", {})
            else:
                parse_flags(kind, flags, "widebeam plan")
    told = capsys.readouterr().err
    assert flag in told and "None" not in told


def test_none_is_a_word_like_others() -> None:
    assert parse(Config, ["m", "--revision", "None"], "widebeam serve", {}).engine.revision == "None"
    with pytest.raises(SystemExit):
        parse(Config, ["m", "--max-context-len", "None"], "widebeam serve", {})


def test_flags_of_others_lead_to_settings_that_there_are() -> None:
    settings = {f"--{name.replace('_', '-')}" for kind in (EngineConfig, ServerConfig) for name in settings_of(kind)}
    assert settings.isdisjoint(ELSEWHERE)
    assert {flag for here in ELSEWHERE.values() for flag in re.findall(r"--[a-z-]+", here)} <= settings


def test_no_setting_is_spelt_twice() -> None:
    """Flags and environment variables drop the section, so names must be unique over all sections."""
    fields = [field.name for struct in (EngineConfig, ServerConfig) for field in msgspec.structs.fields(struct)]
    assert len(fields) == len(set(fields))
