"""The prefix cache over HTTP: what is told of it, who shares with whom, and what ends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.http.service import Service, running_service, wait_until
from tests.http.test_auth import ADMIN, OTHER, USER, bearer, key_file
from tests.http.test_metrics import Growth
from widebeam import AsyncClient, Client
from widebeam.errors import InvalidRequest
from widebeam.http.protocol import PrefillResponse
from widebeam.http.sglang import GenerateResponse

PAGE = 4
IDS = [*range(7, 30)]
"""A prompt of 23 tokens, of which 5 pages can be shared."""
CACHED = 20
RECOMMEND, GENERATE, CHAT, COMPLETIONS = "/v1/recommend", "/generate", "/v1/chat/completions", "/v1/completions"
PREFILL = "/v1/prefill"
ROUTES = (RECOMMEND, GENERATE, CHAT, COMPLETIONS)
SETTINGS: dict[str, Any] = {"prefix_cache": "on", "page_size": PAGE, "max_total_tokens": 512, "max_context_len": 128}


@pytest.fixture(scope="module")
def shared_cached(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    with running_service(checkpoint, catalog_file, **SETTINGS) as service:
        yield service


@pytest.fixture
def cached(shared_cached: Service) -> Iterator[Service]:
    """With a prefix cache, which is empty."""
    shared_cached.thread.run(shared_cached.engine.flush_prefixes())
    yield shared_cached
    shared_cached.check()


def ask(service: Service, route: str, ids: list[int], headers: dict[str, str] | None = None, **fields: Any) -> Any:
    named = "prompt" if route == COMPLETIONS else "input_ids"
    answer = service.post(route, {named: ids, **fields}, headers)
    assert answer.status == 200, answer.content
    return answer.json


def told(answer: Any) -> int:
    """`cached_tokens` of an answer of any dialect."""
    if "meta_info" in answer:
        return int(answer["meta_info"]["cached_tokens"])
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


# What is told


@pytest.mark.parametrize("route", ROUTES)
def test_a_prompt_that_comes_again_is_found(cached: Service, service: Service, route: str) -> None:
    """Whatever route it came by; the answer is that of a server without the cache."""
    first = ask(cached, GENERATE, IDS)
    again = ask(cached, route, IDS)
    longer = ask(cached, route, [*IDS, 7, 8])
    other = ask(cached, route, [30, *IDS])
    assert [told(answer) for answer in (first, again, longer, other)] == [0, CACHED, CACHED, 0]
    cold = ask(service, route, IDS)
    assert told(cold) == 0
    if route == RECOMMEND:
        assert [item["id"] for item in again["items"]] == [item["id"] for item in cold["items"]]
    elif route == GENERATE:
        assert again["output_ids"] == cold["output_ids"]
    else:
        assert len(again["choices"]) == 1
        assert again["choices"][0].get("text") == cold["choices"][0].get("text")
        assert again["choices"][0].get("message") == cold["choices"][0].get("message")


def test_usage_is_a_sum_over_the_prompts(cached: Service) -> None:
    ask(cached, GENERATE, IDS)
    batch = cached.post(COMPLETIONS, {"prompt": [IDS, [30, *IDS], [*IDS[:9], 40]], "n": 2}).json
    assert told(batch) == CACHED + 0 + 8
    listed = cached.post(GENERATE, {"input_ids": [IDS, IDS[:9]]}).json
    assert [told(answer) for answer in listed] == [CACHED, 8]


def test_thinking_tells_what_was_there_before(cached: Service) -> None:
    """And not what its own search behind it found."""
    body = {"input_ids": IDS, "n": 2, "thinking": {"max_tokens": 6, "stop": "a", "suffix": "", "seed": 1}}
    grown = Growth(cached)
    found = [cached.post(CHAT, body).json for _ in range(2)]
    assert [told(answer) for answer in found] == [0, CACHED]
    assert [choice["message"]["content"] for choice in found[0]["choices"]] == [
        choice["message"]["content"] for choice in found[1]["choices"]
    ]
    grown.look()
    assert grown.by("prefix_searches_total") == {"miss": 1, "hit": 3}


def test_metrics_add_up(cached: Service) -> None:
    grown = Growth(cached)
    ask(cached, RECOMMEND, IDS)
    ask(cached, RECOMMEND, IDS)
    ask(cached, RECOMMEND, [7])
    ask(cached, CHAT, [*IDS, 40, 41])
    grown.look()
    assert grown.by("prefix_searches_total") == {"hit": 2, "miss": 2}
    assert grown.of("prefix_hit_tokens_total") == 2 * CACHED
    assert grown.of("prefix_miss_tokens_total") == 23 + 3 + 1 + 5
    assert grown.of("prefix_cached_pages") == grown.of("prefix_idle_pages") == 6
    assert grown.of("prefix_evicted_pages_total") == grown.of("prefix_flushed_pages_total") == 0
    pages = SETTINGS["max_total_tokens"] // PAGE
    for first in range(7, 7 + pages // 16 + 1):
        ask(cached, RECOMMEND, [first] * (16 * PAGE + 1))
    grown.look()
    assert grown.of("prefix_evicted_pages_total") > 0
    assert pages - 17 <= grown.of("prefix_cached_pages") <= pages


# Who shares with whom


@pytest.fixture(scope="module")
def shared_closed(checkpoint: Path, catalog_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    keys = key_file(tmp_path_factory.mktemp("keys"), USER, OTHER)
    admins = key_file(tmp_path_factory.mktemp("keys"), ADMIN)
    with running_service(checkpoint, catalog_file, api_key_file=keys, admin_api_key_file=admins, **SETTINGS) as service:
        yield service


@pytest.fixture
def closed(shared_closed: Service) -> Iterator[Service]:
    """With an empty prefix cache, and with keys."""
    shared_closed.thread.run(shared_closed.engine.flush_prefixes())
    yield shared_closed
    shared_closed.check()


@pytest.mark.parametrize("route", ROUTES)
def test_keys_share_nothing(closed: Service, route: str) -> None:
    def found(key: str, **fields: Any) -> int:
        return told(ask(closed, route, IDS, bearer(key), **fields))

    assert [found(USER), found(USER), found(OTHER), found(ADMIN)] == [0, CACHED, 0, 0]
    assert [found(USER), found(OTHER), found(ADMIN)] == [CACHED] * 3
    assert [found(USER, cache_salt="a"), found(OTHER, cache_salt="a")] == [0, 0]
    assert [found(USER, cache_salt="a"), found(OTHER, cache_salt="a")] == [CACHED, CACHED]


@pytest.mark.parametrize("route", ROUTES)
def test_salts_share_nothing(cached: Service, route: str) -> None:
    salts: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "aa"}]
    if route != RECOMMEND:
        salts += [{"extra_key": "a"}, {"cache_salt": "a", "extra_key": "a"}, {"cache_salt": "b", "extra_key": "a"}]
    for _ in range(2):
        ask(cached, RECOMMEND, IDS, bearer(OTHER))  # that of a tenant of its own, on an open server too
    assert [told(ask(cached, route, IDS, **salt)) for salt in salts] == [0] * len(salts)
    assert [told(ask(cached, route, IDS, **salt)) for salt in salts] == [CACHED] * len(salts)


def test_salts_hold_on_every_route_and_for_thinking(cached: Service) -> None:
    ask(cached, GENERATE, IDS, cache_salt="a", extra_key="b")
    for route in (CHAT, COMPLETIONS):
        assert told(ask(cached, route, IDS, cache_salt="a", extra_key="b")) == CACHED
    thinking = {"max_tokens": 4, "stop": "a", "suffix": ""}
    ask(cached, CHAT, IDS, cache_salt="c", n=2, thinking=thinking)
    assert told(ask(cached, CHAT, IDS)) == 0
    assert told(ask(cached, CHAT, IDS, cache_salt="c")) == CACHED


def test_a_batch_has_a_salt_for_each_prompt(cached: Service) -> None:
    ask(cached, GENERATE, IDS, cache_salt="a", extra_key="x")
    body = {"input_ids": [IDS] * 3, "cache_salt": ["a", "b", "a"], "extra_key": "x"}
    assert [told(answer) for answer in cached.post(GENERATE, body).json] == [CACHED, 0, CACHED]
    answer = cached.post(GENERATE, body | {"extra_key": ["x", "x"]})
    assert (answer.status, answer.json["error"]["param"]) == (400, "extra_key")


@pytest.mark.parametrize("salt", ["", "s" * 257, 7, ["a"]])
@pytest.mark.parametrize("route", ROUTES)
def test_salts_out_of_range(cached: Service, route: str, salt: Any) -> None:
    for name in ("cache_salt", "extra_key")[: 1 if route == RECOMMEND else 2]:
        answer = cached.post(route, {"prompt" if route == COMPLETIONS else "input_ids": IDS, name: salt})
        assert (answer.status, answer.json["error"]["param"]) == (400, name)


# Ahead of the request


@pytest.fixture(scope="module")
def shared_marked(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path = tiny.save_catalog(tmp_path_factory.mktemp("marked") / "items.jsonl")
    header = json.loads((path.parent / "catalog.json").read_text()) | {"begin": "b", "end": "next"}
    (path.parent / "catalog.json").write_text(json.dumps(header))
    with running_service(checkpoint, path, **SETTINGS) as service:
        yield service
        service.check()


HISTORY = [f"item-{index}" for index in range(30)]
FORMS: list[dict[str, Any]] = [
    {"history": HISTORY[:5]},
    {"history": [*HISTORY, "item-999"]},  # over the template's 20, and one that there is not
    {"history": []},
    {"prompt": "watched <a_1> <b_2> <c_3> <a_2> <b_2> <c_3> next"},
    {"messages": [{"role": "user", "content": "watched <a_1> <b_2> a b a"}]},
    {"input_ids": IDS},
    {"input_ids": [*IDS, 10]},  # the begin marker is there already
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{next(iter(form))}-{len(next(iter(form.values())))}")
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "markers"])
def test_a_prefilled_prompt_is_the_one_that_comes(
    cached: Service, shared_marked: Service, form: dict[str, Any], marked: bool
) -> None:
    service = shared_marked if marked else cached
    service.thread.run(service.engine.flush_prefixes())
    ahead = service.post(PREFILL, {**form, "ttl_s": 5, "request_id": "ahead"})
    assert ahead.status == 200, ahead.content
    again = service.post(PREFILL, form).json
    found = service.post(RECOMMEND, {**form, "n": 3}).json
    prompt_tokens = found["usage"]["prompt_tokens"]
    cacheable = (prompt_tokens - 1) // PAGE * PAGE
    assert ahead.json == {
        "id": "ahead",
        "prompt_tokens": prompt_tokens,
        "cached_tokens": 0,
        "cacheable_tokens": cacheable,
        "warnings": found["warnings"],
    }
    assert again["cached_tokens"] == told(found) == cacheable
    late = service.post(PREFILL, {**form, "min_catalog_version": 2})
    assert (late.status, late.json["error"]["code"]) == (503, "catalog_version_not_ready")
    assert len(found["items"]) == 3 and len(found["warnings"]) == (2 if "item-999" in form.get("history", []) else 0)


@pytest.fixture(scope="module")
def bare(checkpoint: Path) -> Iterator[Service]:
    """Without a catalog."""
    with running_service(checkpoint, None, **SETTINGS) as service:
        yield service
        service.check()


TURNS = [{"role": "user", "content": "watched <a_1> <b_2> a b a"}]
TEXTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (GENERATE, {"input_ids": IDS}, {"input_ids": IDS}),
    (GENERATE, {"prompt": "watched <a_1> <b_2> <c_3> next"}, {"text": "watched <a_1> <b_2> <c_3> next"}),
    (CHAT, {"messages": TURNS}, {"messages": TURNS}),
]


@pytest.mark.parametrize(("route", "form", "body"), TEXTS, ids=["input_ids", "prompt", "messages"])
@pytest.mark.parametrize(
    ("server", "named"),
    [("bare", {}), ("bare", {"catalog": "none"}), ("shared_marked", {"catalog": "none"})],
    ids=["no-catalog", "none", "none-of-one"],
)
def test_the_prompt_of_a_text_is_prefilled_without_a_catalog(
    request: pytest.FixtureRequest,
    server: str,
    named: dict[str, str],
    route: str,
    form: dict[str, Any],
    body: dict[str, Any],
) -> None:
    service: Service = request.getfixturevalue(server)
    service.thread.run(service.engine.flush_prefixes())
    ahead = service.post(PREFILL, form | named)
    assert ahead.status == 200, ahead.content
    long = {"sampling_params": {"max_new_tokens": 4}} if route == GENERATE else {"max_completion_tokens": 4}
    found = service.post(route, body | named | long).json
    tokens = found["usage" if route == CHAT else "meta_info"]["prompt_tokens"]
    assert ahead.json["prompt_tokens"] == tokens  # no begin marker
    assert told(found) == ahead.json["cacheable_tokens"] == (tokens - 1) // PAGE * PAGE > 0


def test_a_history_needs_a_catalog(bare: Service) -> None:
    for named in ({}, {"catalog": "none"}):
        answer = bare.post(PREFILL, {"history": ["item-1"]} | named)
        assert (answer.status, answer.json["error"]["code"]) == (400, "no_catalog")


def test_a_prefill_is_for_its_tenant(closed: Service) -> None:
    body = {"history": HISTORY[:8]}
    prefilled = closed.post(PREFILL, body | {"cache_salt": "a"}, bearer(USER)).json
    assert prefilled["cacheable_tokens"] > 0

    def found(key: str, **salt: str) -> int:
        return told(closed.post(RECOMMEND, body | salt, bearer(key)).json)

    assert [found(USER), found(OTHER, cache_salt="a"), found(USER, cache_salt="b")] == [0, 0, 0]
    assert found(USER, cache_salt="a") == prefilled["cacheable_tokens"]


def test_a_hint_holds_for_its_time(cached: Service) -> None:
    """More prompts come than there is room for: what is expected stays, what was there before it goes."""
    cached.post(PREFILL, {"input_ids": IDS, "ttl_s": 600})
    ask(cached, RECOMMEND, [40, *IDS])
    pages = SETTINGS["max_total_tokens"] // PAGE
    for first in range(7, 7 + 2 * pages // 16):
        ask(cached, RECOMMEND, [first] * (16 * PAGE + 1))
    assert told(ask(cached, RECOMMEND, [40, *IDS])) == 0
    assert told(ask(cached, RECOMMEND, IDS)) == CACHED


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "history"),
        ({"prompt": "a", "input_ids": [7]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [7, 10_000]}, "input_ids"),
        ({"input_ids": [7] * 129}, "input_ids"),
        ({"input_ids": [7], "ttl_s": 0}, "ttl_s"),
        ({"input_ids": [7], "ttl_s": 3601}, "ttl_s"),
        ({"input_ids": [7], "ttl_s": "1"}, "ttl_s"),
        ({"input_ids": [7], "cache_salt": ""}, "cache_salt"),
        ({"history": ["item-1"], "catalog": "none"}, "catalog"),
        ({"input_ids": [7], "catalog": "none", "min_catalog_version": 1}, "min_catalog_version"),
        ({"input_ids": [7], "n": 3}, "n"),
    ],
)
def test_what_cannot_be_prefilled_is_refused(cached: Service, body: dict[str, Any], param: str) -> None:
    answer = cached.post(PREFILL, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_without_a_cache_there_is_nothing_to_fill(service: Service) -> None:
    answer = service.post(PREFILL, {"input_ids": IDS})
    assert (answer.status, answer.json["error"]["code"]) == (400, "no_prefix_cache")
    assert "--prefix-cache" in answer.json["error"]["message"]


def test_a_prefill_generates_nothing(cached: Service) -> None:
    grown = Growth(cached)
    cached.post(PREFILL, {"input_ids": IDS})
    grown.look()
    assert grown.of("prompt_tokens_total") == len(IDS) and grown.of("generated_tokens_total") == 0
    assert grown.of("requests_total", route=PREFILL, outcome="ok") == 1


async def test_the_client_prefills(cached: Service) -> None:
    def blocking() -> PrefillResponse:
        with Client(cached.url) as client:
            return client.prefill(history=HISTORY[:9], cache_salt="a", ttl_s=2.5, request_id="p-1")

    first = await asyncio.to_thread(blocking)
    assert (first.id, first.cached_tokens, first.warnings) == ("p-1", 0, [])
    async with AsyncClient(cached.url) as client:
        second = await client.prefill(history=HISTORY[:9], cache_salt="a", priority=-5)
        found = await client.recommend(history=HISTORY[:9], cache_salt="a", n=2)
        assert second.cached_tokens == found.usage.prompt_tokens_details.cached_tokens == first.cacheable_tokens > 0
        text = await client.prefill(input_ids=IDS, catalog="none")
        again = await client.generate(input_ids=IDS, catalog="none", sampling_params={"max_new_tokens": 4})
        assert isinstance(again, GenerateResponse)
        assert again.meta_info.cached_tokens == text.cacheable_tokens == CACHED
        with pytest.raises(InvalidRequest):
            await client.prefill(history=[], prompt="a")


# What ends it


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flush_forgets_everything(cached: Service, method: str) -> None:
    """As SGLang's clients ask for it, in the middle of requests too."""
    ask(cached, RECOMMEND, IDS)
    grown = Growth(cached)
    with ThreadPoolExecutor(1) as pool, cached.held():
        running = pool.submit(ask, cached, RECOMMEND, IDS)
        wait_until(lambda: cached.engine.stats().requests_in_flight == 1)
    assert told(running.result(30)) == CACHED
    answer = cached.call(method, "/flush_cache?timeout=60")
    assert answer.status == 200 and answer.content == b"Cache flushed.\n"
    assert answer.headers["content-type"].startswith("text/plain")
    grown.look()
    assert grown.of("prefix_flushed_pages_total") == 5 and grown.after["widebeam_prefix_cached_pages", ()] == 0
    assert told(ask(cached, RECOMMEND, IDS)) == 0
    assert told(ask(cached, RECOMMEND, IDS)) == CACHED
