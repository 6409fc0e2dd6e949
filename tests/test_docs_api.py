"""docs/api.md, docs/catalogs.md and docs/history.md: they list what there is, and what they show is what happens."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from aiohttp import hdrs

from tests.http.service import Service, running_service
from widebeam import anchored_history, errors
from widebeam.catalogs import Inspect, Validate
from widebeam.cli import main
from widebeam.config import EngineConfig, ServerConfig
from widebeam.constraints import filter_spec
from widebeam.constraints.assign import Assign
from widebeam.constraints.build import Build
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filter_spec import Filters
from widebeam.constraints.filters import MASK_CACHE_BYTES, allowed_items
from widebeam.constraints.header import Header, Level, Order
from widebeam.constraints.template import HistoryTemplate
from widebeam.engine.engine import Engine
from widebeam.engine.request import MAX_TTL_S
from widebeam.http import openai, protocol, sglang, tokens
from widebeam.http.app import build_app
from widebeam.http.catalog_protocol import MAX_CHANGES, CatalogInfo, PutCatalog, RollBack, UpdateItems, UploadQuery
from widebeam.http.protocol import PrefillRequest, RecommendRequest

ROOT = Path(__file__).resolve().parent.parent
API = (ROOT / "docs" / "api.md").read_text()
CATALOGS = (ROOT / "docs" / "catalogs.md").read_text()
HISTORY = (ROOT / "docs" / "history.md").read_text()
MIGRATING = (ROOT / "docs" / "migrating.md").read_text()
BLOCK = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
CURL = re.compile(r"(?:# (\d+)\n)?curl -s localhost:8000(/\S+)(?:[\s\\]+-d '(.*)')?\n")


def section(document: str, title: str) -> str:
    """The text under a heading of the second level."""
    return document.split(f"\n## {title}\n")[1].split("\n## ")[0]


def names(text: str) -> set[str]:
    """What stands in backticks and is one name."""
    return set(re.findall(r"`(\w+)`", text))


def paragraph(text: str, start: str) -> str:
    return text.split(start)[1].split("\n\n")[0]


# What the documents list


async def test_every_route_is_listed_and_every_listed_route_exists() -> None:
    engine = Engine("nowhere")
    routes = build_app(engine, ServerConfig()).router.routes()
    await engine.stop()
    real = {(r.method, r.resource.canonical) for r in routes if r.resource is not None and r.method != hdrs.METH_HEAD}
    assert set(re.findall(r"`(GET|POST|PUT|DELETE) (/[^`]+)`", API)) == real
    paths = {path for _, path in real}
    missing, here = zip(
        *(row.split("|")[1:3] for row in section(MIGRATING, "Routes that are not here").splitlines()[3:]), strict=True
    )
    assert paths.isdisjoint(re.findall(r"`(/[^`]+)`", "".join(missing)))
    assert {("GET", path) for path in re.findall(r"`GET (/[^`]+)`", "".join(here))} <= real


def test_metrics_that_stand_in_for_others_are_there() -> None:
    mentioned = set(re.findall(r"`(widebeam_\w+)`", MIGRATING))
    assert len(mentioned) > 10 and mentioned <= names(section(API, "Metrics"))


def test_every_field_is_named_in_its_route() -> None:
    recommend, generate, chat, completions = (
        section(API, f"POST {path}")
        for path in ("/v1/recommend", "/generate", "/v1/chat/completions", "/v1/completions")
    )
    assert set(RecommendRequest.__struct_fields__) <= names(recommend)
    sampling = set(sglang.SamplingParams.__struct_encode_fields__)
    assert sampling | set(sglang.GenerateRequest.__struct_fields__) <= names(generate)
    assert set(openai.ChatRequest.__struct_fields__) <= names(chat)
    assert set(openai.CompletionRequest.__struct_fields__) <= names(completions)
    assert set(tokens.TokenizeRequest.__struct_fields__) <= names(section(API, "POST /tokenize"))
    assert set(tokens.DetokenizeRequest.__struct_fields__) <= names(section(API, "POST /detokenize"))
    prefill = section(API, "POST /v1/prefill")
    assert set(PrefillRequest.__struct_fields__) <= names(prefill)
    assert f"{MAX_TTL_S:,}" in prefill
    live = section(API, "Live catalogs")
    for kind in (CatalogInfo, UpdateItems, UploadQuery):
        assert set(kind.__struct_fields__) <= names(live) | set(re.findall(r'"(\w+)":', live))
    for kind in (PutCatalog, RollBack):
        assert all(f'{{"{field}": ' in live or f"`{field}`" in live for field in kind.__struct_fields__)
    assert f"{MAX_CHANGES:,}" in live


def test_every_field_of_an_answer_is_named() -> None:
    quoted = re.findall(r"`([\w.]+)`", API) + re.findall(r'"(\w+)":', API)
    named = {part for path in quoted for part in path.split(".")}
    modules = (openai, sglang, protocol, tokens)
    structs = {kind for module in modules for kind in vars(module).values() if isinstance(kind, msgspec.StructMeta)}
    answers = {kind for kind in structs if not kind.__struct_config__.forbid_unknown_fields}
    assert {openai.ChatResponse, sglang.RequestMeta, protocol.ModelCard} < answers
    assert {field for kind in answers for field in kind.__struct_fields__} <= named


def test_refused_and_ignored_fields_are_those_of_the_code() -> None:
    generate, chat = section(API, "POST /generate"), section(API, "POST /v1/chat/completions")
    refused = names(paragraph(generate, "**Refused unless neutral**")) - {"null", "sampling_params"}
    assert refused == {*sglang.GENERATE_NEUTRAL, *sglang.SAMPLING_NEUTRAL}
    assert names(paragraph(generate, "**Accepted at any value:**")) == set(sglang.LABELS)
    in_chat, in_completions = {*openai.CHAT_NEUTRAL, *openai.MESSAGE_NEUTRAL}, set(openai.COMPLETION_NEUTRAL)
    for text, neutral in ((chat, in_chat), (section(API, "POST /v1/completions"), in_completions)):
        accepted, refused = paragraph(text, "Accepted at any value:").split("Refused unless neutral:")
        assert names(accepted) == set(openai.LABELS)
        assert names(refused) == neutral


def statuses_of_codes() -> dict[str, int]:
    """Every stable code with its status: those of the classes, and those written where an error is raised."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RequestError)]
    by_name = {kind.__name__: kind for kind in kinds}
    statuses = {kind.code: kind.status for kind in by_name.values()}
    for path in sorted((ROOT / "widebeam").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                    statuses[str(keyword.value.value)] = by_name[node.func.id].status
    return statuses


def test_every_code_is_in_the_table_at_its_status() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (.*) \|$", section(API, "Errors"), re.MULTILINE)
    other = {
        "param",
        "timeout",
        "Allow",
        *RecommendRequest.__struct_fields__,
        *sglang.SamplingParams.__struct_encode_fields__,
    }
    listed = {code: int(status) for status, text in rows for code in names(text) - other}
    assert listed == statuses_of_codes()


@pytest.mark.parametrize("document", [API, CATALOGS], ids=["api", "catalogs"])
def test_every_flag_exists(document: str) -> None:
    kinds = (EngineConfig, ServerConfig, Build, Assign, Inspect, Validate)
    flags = {f"--{name.replace('_', '-')}" for kind in kinds for name in kind.__struct_fields__}
    assert set(re.findall(r"(?<!-)--[a-z][a-z-]+", document)) <= flags


def test_every_field_of_the_header_is_named() -> None:
    rows = section(CATALOGS, "The header")
    for kind, prefix in ((Header, ""), (Level, "levels[]."), (Order, "order."), (HistoryTemplate, "template.")):
        for field in kind.__struct_fields__:
            assert f"`{prefix}{field}`" in rows or f"`.{field}`" in rows, f"{prefix}{field}"


# What docs/api.md shows


@pytest.fixture(scope="module")
def service(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    with running_service(checkpoint, catalog_file, prefix_cache="on", page_size=16) as running:
        yield running
        running.check()


def examples() -> list[tuple[str, str | None, int, Any]]:
    """(path, body, status, the answer shown behind it or None) of each curl command."""
    blocks = [(language, text) for language, _, text in BLOCK.findall(API)]
    found = []
    for (language, text), (next_language, next_text) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "bash":
            match = CURL.fullmatch(text)
            assert match is not None, f"not a curl command of the usual form: {text}"
            shown = json.loads(next_text) if next_language == "json" else None
            found.append((match[2], match[3], int(match[1] or 200), shown))
    return found


def shape(value: Any) -> Any:
    """Types in place of values."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return float if type(value) is int else type(value)


@pytest.mark.parametrize(("path", "body", "status", "shown"), examples())
def test_requests_are_answered_as_shown(service: Service, path: str, body: str | None, status: int, shown: Any) -> None:
    answer = service.get(path) if body is None else service.post(path, body.encode())
    assert answer.status == status, answer.content
    if shown is None:
        assert body is not None and json.loads(body)["stream"] is True
        *events, end = answer.content.decode().removesuffix("\n\n").split("\n\n")
        assert end == "data: [DONE]"
        assert [json.loads(event.removeprefix("data: "))["index"] for event in events] == [0, 1]
        return
    assert shape(answer.json) == shape(shown)
    if status != 200:
        told, shown_error = answer.json["error"], shown["error"]
        assert (told["code"], told["type"], told["param"]) == tuple(
            shown_error[key] for key in ("code", "type", "param")
        )


def test_the_documented_trap(service: Service) -> None:
    """A beam_width without n returns one beam."""
    found = service.post("/generate", {"input_ids": [7], "sampling_params": {"beam_width": 16}}).json
    assert len(found["meta_info"]["beam_results"]) == 1


def test_the_client_examples_run(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for code in (text for language, _, text in BLOCK.findall(section(API, "Python client")) if language == "python"):
        exec(compile(code.replace("http://127.0.0.1:8000", service.url), "docs/api.md", "exec"), {})
        printed.append(capsys.readouterr().out.splitlines())
    (answered, beams, chat, refused), (together,), (session,) = printed
    assert answered.startswith("level [") and answered.count("'Title ") == 3
    assert len(json.loads(beams)) == 4
    assert [len(choice) for choice in ast.literal_eval(chat)] == [3, 3]
    assert refused == "unknown_catalog catalog 404"
    assert [len(items) for items in ast.literal_eval(together)] == [2, 2, 2]
    assert re.fullmatch("[0-9a-f]{64} 3", session)


def test_the_example_of_openais_sdk_runs(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = BLOCK.findall(section(API, "POST /v1/chat/completions"))
    (code,) = (text for language, _, text in blocks if language == "python")
    exec(compile(code.replace("http://127.0.0.1:8000", service.url), "docs/api.md", "exec"), {})
    assert len(ast.literal_eval(capsys.readouterr().out)) == 2


# What docs/history.md shows


def test_the_anchored_history_is_asked_for(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (text for language, _, text in BLOCK.findall(HISTORY) if language == "python")
    scope: dict[str, Any] = {}
    exec(compile(code.replace("http://127.0.0.1:8000", service.url), "docs/history.md", "exec"), scope)
    length, items = capsys.readouterr().out.strip().split(" ", 1)
    events = scope["events"]
    assert int(length) == 16 and len(ast.literal_eval(items)) == 3
    assert not set(ast.literal_eval(items)) & set(events)
    assert scope["answer"].warnings == []  # every item is known, and the template cuts nothing
    (tail,) = re.findall(r"`(anchored_history\(events\[.*?\))`", HISTORY)
    assert eval(tail, scope) == scope["history"]


def test_the_windows_drawn_are_those_of_the_code() -> None:
    drawn = re.findall(r"^after (\d+) .* (\d+) \.\. \d+ +(\d+) \.\. (\d+)$", HISTORY, re.MULTILINE)
    assert len(drawn) == 3
    for total, plain, anchored, last in (map(int, row) for row in drawn):
        assert anchored_history(range(total), 6, 1) == [*range(plain, last + 1)]
        assert anchored_history(range(total), 6, 4) == [*range(anchored, last + 1)]


# What docs/catalogs.md shows


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the document, and `model`; the working directory of the test."""
    (tmp_path / "model").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    for language, title, text in BLOCK.findall(CATALOGS):
        if title:
            (tmp_path / title).parent.mkdir(exist_ok=True)
            (tmp_path / title).write_text(text)
        if language == "python":
            exec(compile(text, title, "exec"), {})
    return tmp_path


def catalog_command(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `widebeam catalog ..` prints, problems included, but for how long it took."""
    with pytest.raises(SystemExit):
        main(line.split()[1:])
    done = capsys.readouterr()
    return re.sub(r"loaded in \d+\.\d\d s", "loaded in 0.01 s", done.out + done.err)


def test_commands_print_what_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sessions = "".join(text for language, _, text in BLOCK.findall(CATALOGS) if language == "console")
    commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", sessions, re.MULTILINE)
    assert len(commands) >= 4
    for line, shown in commands:
        assert catalog_command(line, capsys) == shown


def test_every_catalog_shown_is_fine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = ("catalog.json", ".item.json", ".py")
    titles = [title for _, title, _ in BLOCK.findall(CATALOGS) if title and not title.endswith(others)]
    for title in [*titles, "shop/items.parquet"]:
        fine = "is fine" in catalog_command(f"widebeam catalog validate {title} --model model", capsys)
        assert fine == (not title.startswith(("bad/", "onerec/"))), title


def test_the_header_shown_has_every_field(folder: Path) -> None:
    header = msgspec.json.decode((folder / "shop" / "catalog.json").read_bytes(), type=Header)
    assert None not in (header.sid, header.levels, header.order, header.template) and header.filters


def test_the_filters_shown_leave_the_item_that_passes(folder: Path) -> None:
    shown = next(text for language, _, text in BLOCK.findall(section(CATALOGS, "Filters")) if language == "json")
    shop = Catalog.load(folder / "shop" / "items.jsonl")
    mask, warnings = allowed_items(shop, msgspec.json.decode(shown, type=Filters))
    assert [shop.item_id(row) for row in range(shop.num_items) if mask.allows(row)] == ["item-8"]
    assert warnings == []


def test_every_operator_and_limit_of_filters_is_named() -> None:
    text = section(CATALOGS, "Filters")
    assert {*get_args(filter_spec.Op), *Filters.__struct_fields__} <= set(re.findall(r"`(\S+?)`", text))
    for limit in (filter_spec.MAX_FILTER_IDS, filter_spec.MAX_VALUES):
        assert f"{limit:,}" in text
    assert f"| {filter_spec.MAX_PREDICATES} |" in text and f"{MASK_CACHE_BYTES >> 20} MiB" in text
