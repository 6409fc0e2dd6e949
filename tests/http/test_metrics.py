"""/metrics: every number against what was sent, every metric against docs/api.md, every name against conventions."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.http.service import Service, running_service, wait_until

API = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
RECOMMEND, GENERATE, CHAT = "/v1/recommend", "/generate", "/v1/chat/completions"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def families(service: Service, query: str = "") -> list[Metric]:
    answer = service.get(f"/metrics{query}")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
    return list(parse_text(answer.content.decode()))


def samples(service: Service) -> Samples:
    found = [sample for family in families(service) for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}


class Growth:
    """What has changed since it was made."""

    def __init__(self, service: Service) -> None:
        self.service, self.before = service, samples(service)
        self.after = self.before

    def look(self) -> None:
        """Take numbers anew. The device's last wave is over when it says so itself."""
        wait_until(lambda: self.service.engine.stats().waves_on_device == 0)
        self.after = samples(self.service)

    def of(self, name: str, **labels: str) -> float:
        key = (f"widebeam_{name}", tuple(sorted(labels.items())))
        return self.after[key] - self.before.get(key, 0.0)

    def by(self, name: str) -> dict[str, float]:
        """A metric of one label: what grew, by the label's value."""
        keys = [key for key in self.after if key[0] == f"widebeam_{name}"]
        grown = {key[1][0][1]: self.after[key] - self.before.get(key, 0.0) for key in keys}
        return {value: amount for value, amount in grown.items() if amount}

    def histogram(self, name: str, **labels: str) -> tuple[float, float]:
        """How many numbers came, and their sum."""
        return self.of(f"{name}_count", **labels), self.of(f"{name}_sum", **labels)


@pytest.fixture(scope="module")
def shared_small(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    limits = {"max_waiting_requests": 6, "max_wave_requests": 2, "max_wave_rows": 64, "max_beam_width": 32}
    with running_service(checkpoint, catalog_file, **limits) as service:
        yield service


@pytest.fixture
def small(shared_small: Service) -> Iterator[Service]:
    """Six requests may wait, two run together."""
    yield shared_small
    shared_small.check()


@contextmanager
def waiting(service: Service, *posts: tuple[str, dict[str, Any]]) -> Iterator[list[int]]:
    """These requests wait, in this order, until the block ends; their statuses are in the list afterwards."""
    statuses: list[int] = []
    with ThreadPoolExecutor(len(posts)) as pool:
        with service.held():
            sent = []
            for path, body in posts:
                sent.append(pool.submit(service.post, path, body))
                wait_until(lambda: service.engine.stats().requests_in_flight == len(sent))
            yield statuses
        statuses += [post.result(30).status for post in sent]


# What was sent is what is counted


def test_requests_tokens_and_times(small: Service) -> None:
    grown = Growth(small)
    small.post(RECOMMEND, {"input_ids": [7, 8], "n": 2})
    small.post(RECOMMEND, {"input_ids": [], "n": 2})
    small.post(GENERATE, {"input_ids": [[7], [8, 9, 10]], "sampling_params": {"n": 3}})
    small.post(CHAT, {"input_ids": [7], "beam_width": 5, "catalog": "none", "max_completion_tokens": 2})
    small.get("/nowhere")
    grown.look()
    assert grown.of("requests_total", route=RECOMMEND, outcome="ok") == 1
    assert grown.of("requests_total", route=RECOMMEND, outcome="invalid_request") == 1
    assert grown.of("requests_total", route=GENERATE, outcome="ok") == 1
    assert grown.of("requests_total", route=CHAT, outcome="ok") == 1
    assert grown.of("requests_total", route="unmatched", outcome="not_found") == 1
    assert grown.by("searches_total") == {"ok": 4}
    assert grown.by("request_seconds_count") == {RECOMMEND: 2, GENERATE: 1, CHAT: 1, "unmatched": 1, "/metrics": 1}
    assert grown.by("http_overhead_seconds_count") == {RECOMMEND: 1, GENERATE: 1, CHAT: 1}
    assert grown.of("prompt_tokens_total") == 2 + 1 + 3 + 1
    assert grown.of("generated_tokens_total") == 3 * (2 + 3 + 3) + 2
    for phase in ("queue", "prefill", "decode", "search"):
        assert grown.of(f"{phase}_seconds_count") == 4
    phases = sum(grown.of(f"{phase}_seconds_sum") for phase in ("queue", "prefill", "decode"))
    assert 0 < phases <= grown.of("search_seconds_sum")
    for route in (RECOMMEND, CHAT):  # each sent one search alone
        assert 0 < grown.of("http_overhead_seconds_sum", route=route) < grown.of("request_seconds_sum", route=route)
    assert grown.histogram("prompt_length_tokens") == (4, 7)
    assert grown.histogram("beam_width") == (4, 16 + 3 + 3 + 5)
    assert grown.histogram("wave_prompt_tokens") == (grown.of("wave_requests_count"), 7)


def test_waves_and_why_they_were_closed(small: Service) -> None:
    grown = Growth(small)
    text = {"input_ids": [7], "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}, "catalog": "none"}
    wide = {"input_ids": [7, 8], "beam_width": 30, "n": 30}
    with waiting(
        small, (RECOMMEND, wide), (RECOMMEND, {"input_ids": [7]}), (RECOMMEND, {"input_ids": [9]}),
        (RECOMMEND, {"input_ids": [7], "normalizer": "legal"}), (GENERATE, text),
    ) as statuses:  # fmt: skip
        small.engine._worker.scheduler.rows_limit = 40  # as after running out of memory
    small.engine._worker.scheduler.rows_limit = 64
    assert statuses == [200] * 5
    grown.look()
    # the wide one alone, for want of rows; two of its kind; the one of another kind; the long one last
    assert grown.by("waves_total") == {"8": 3, "16": 1}
    assert grown.by("waves_closed_total") == {"rows": 1, "kind": 1, "levels": 1, "empty": 1}
    assert grown.histogram("wave_requests") == (4, 5)
    assert grown.histogram("wave_rows") == (4, 30 + 16 + 16 + 16 + 1)
    assert grown.histogram("wave_prompt_tokens") == (4, 6)
    assert grown.of("wave_host_seconds_count") == 3, "a long wave waits for the device"
    assert grown.of("company_wait_seconds_count") == 3, "all but the first waited while the device was busy"
    for name in ("waves_passing", "jobs_overtaken", "jobs_aged", "jobs_dropped", "out_of_memory", "fallbacks"):
        assert grown.of(f"{name}_total") == 0
    for pool in ("context_pages", "beam_slots"):
        assert 0 < grown.after[f"widebeam_{pool}_high_water", ()] <= grown.after[f"widebeam_{pool}", ()]


def test_the_memory_of_catalogs(checkpoint: Path, catalog_file: Path) -> None:
    with running_service(checkpoint, catalog_file, catalog_memory_gib=0.25) as service:

        def in_use() -> float:
            return samples(service)["widebeam_catalog_bytes_in_use", ()]

        def needed() -> int:
            catalog = service.engine.catalogs.get(None)
            assert catalog is not None
            return 5 * 4 * (catalog.index.num_nodes + 1)

        total = samples(service)["widebeam_catalog_bytes", ()]
        assert 2**28 - 20 < total <= 2**28
        first = needed()
        assert in_use() == first
        name = service.engine.catalogs.names()[0]
        row = {"item_id": "new", "sid": ["<a_4>", "<b_1>", "<c_2>"]}
        assert service.post(f"/v1/catalogs/{name}/items", {"upsert": [row]}).status == 200
        second = needed()
        assert second > first and in_use() in (first + second, second)


def test_what_waits_and_what_is_refused(small: Service) -> None:
    grown = Growth(small)
    beams = {"sampling_params": {"beam_width": 16, "n": 16, "max_new_tokens": 3}, "catalog": "none"}
    with waiting(small, *[(GENERATE, {"input_ids": [7] * length, **beams}) for length in range(1, 7)]) as statuses:
        refused = small.post(RECOMMEND, {"input_ids": [7]})
        assert refused.status == 429
        now = samples(small)
        for name, amount in {"requests": 6, "rows": 6 * 16, "tokens": 21}.items():
            assert now[f"widebeam_{name}_in_flight", ()] == now[f"widebeam_{name}_waiting", ()] == amount
            assert now[f"widebeam_{name}_in_flight_limit", ()] >= amount
        assert now["widebeam_row_levels_in_flight", ()] == 6 * (1 + 16 + 16)
        assert now["widebeam_requests_in_flight_limit", ()] == 6
        assert round(now["widebeam_retry_after_seconds", ()], 3) == refused.json["error"]["retry_after_s"]
    assert statuses == [200] * 6
    grown.look()
    assert grown.by("requests_refused_total") == {"requests": 1}
    assert grown.of("requests_total", route=RECOMMEND, outcome="overloaded") == 1
    assert grown.by("searches_total") == {"ok": 6}
    assert grown.by("waves_closed_total") == {"requests": 2, "empty": 1}
    for name in ("requests", "rows", "row_levels", "tokens"):
        assert grown.after[f"widebeam_{name}_in_flight", ()] == 0


def test_those_who_give_up(small: Service) -> None:
    grown = Growth(small)
    with small.held(), ThreadPoolExecutor(1) as pool:
        body = b'{"input_ids": [7]}'
        with socket.create_connection(small.address) as gone:
            gone.sendall(b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            wait_until(lambda: small.engine.stats().requests_in_flight == 1)
        wait_until(lambda: small.engine.stats().requests_in_flight == 0)
        assert pool.submit(small.post, RECOMMEND, {"input_ids": [7], "timeout_ms": 20}).result(10).status == 504
    assert small.post(RECOMMEND, {"input_ids": [7]}).status == 200
    grown.look()
    assert grown.by("searches_total") == {"cancelled": 2, "ok": 1}, "the server itself ends what takes too long"
    assert grown.of("jobs_dropped_total") == 2
    assert grown.of("wave_requests_count") == grown.of("http_overhead_seconds_count", route=RECOMMEND) == 1
    for outcome in ("cancelled", "deadline_exceeded", "ok"):
        assert grown.of("requests_total", route=RECOMMEND, outcome=outcome) == 1


def gated(launch: Callable[..., Any], begun: threading.Event, release: threading.Event) -> Callable[..., Any]:
    def launch_later(*arguments: Any) -> Any:
        begun.set()
        assert release.wait(20)
        return launch(*arguments)

    return launch_later


def test_what_is_on_the_device(small: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Event(), threading.Event()
    monkeypatch.setattr(small.engine._runtime, "launch", gated(small.engine._runtime.launch, begun, release))
    page = small.engine.config.page_size
    with ThreadPoolExecutor(1) as pool:
        post = pool.submit(small.post, RECOMMEND, {"input_ids": [7] * (page + 1), "n": 3, "beam_width": 20})
        assert begun.wait(10)
        now = samples(small)
        release.set()
        assert post.result(30).status == 200
    used = {
        name: now[f"widebeam_{name}", ()] for name in ("waves_on_device", "beam_rows_in_use", "context_pages_in_use")
    }
    assert used == {"waves_on_device": 1, "beam_rows_in_use": 20, "context_pages_in_use": 2}
    assert now["widebeam_requests_in_flight", ()] == 1 and now["widebeam_requests_waiting", ()] == 0
    assert now["widebeam_requests_running", ()] == 1
    assert now["widebeam_beam_slots_in_use", ()] == 2 * 24  # two levels decode, in the next size up from 20 rows
    gone = (*used, "requests_running", "context_pages_leased", "beam_slots_leased")
    wait_until(lambda: not any(samples(small)[f"widebeam_{name}", ()] for name in gone))


def test_what_is_held_of_the_pools_is_counted_there(small: Service) -> None:
    """Whether a wave knows of it or not: this is how a leak would show."""
    core = small.engine._runtime.core
    pages, slots = core.context.acquire(small.engine.config.page_size + 1), core.beams.acquire(5)
    assert pages is not None and slots is not None
    now = samples(small)
    core.context.release(pages)
    core.beams.release(slots)
    assert (now["widebeam_context_pages_leased", ()], now["widebeam_beam_slots_leased", ()]) == (2, 5)
    assert now["widebeam_context_pages_in_use", ()] == now["widebeam_beam_slots_in_use", ()] == 0


def test_a_wave_that_runs_out_of_memory(small: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    grown = Growth(small)
    with monkeypatch.context() as patch:
        patch.setattr(small.engine._runtime, "launch", no_memory)
        assert small.post(RECOMMEND, {"input_ids": [7]}).status == 503
        patch.setattr(small.engine._runtime, "launch", lambda *_: 1 / 0)
        assert small.post(RECOMMEND, {"input_ids": [7]}).status == 500
    grown.look()
    assert grown.of("out_of_memory_total") == 1
    assert grown.by("searches_total") == {"out_of_memory": 1, "engine_error": 1}
    assert grown.by("waves_total") == {"8": 2}
    assert grown.of("wave_host_seconds_count") == 0, "nothing was launched"


def test_two_servers_of_one_process_count_apart(service: Service, bare_service: Service) -> None:
    one, other = Growth(service), Growth(bare_service)
    service.post(RECOMMEND, {"input_ids": [7]})
    one.look()
    other.look()
    assert one.by("searches_total") == {"ok": 1} and other.by("searches_total") == {}
    assert one.by("catalog_version") == {} == other.by("catalog_version")


# What there is


def test_facts(service: Service, bare_service: Service) -> None:
    assert samples(bare_service).keys().isdisjoint({("widebeam_catalog_version", (("catalog", "items"),))})
    found = samples(service)
    catalog = service.engine.catalogs.get("items")
    assert catalog is not None
    assert found["widebeam_catalog_version", (("catalog", "items"),)] == 1
    assert found["widebeam_catalog_items", (("catalog", "items"),)] == catalog.num_items
    (info,) = [dict(labels) for name, labels in found if name == "widebeam_model_info"]
    assert info == {
        "model": service.engine.config.model,
        "dtype": "float32",
        "device": "cpu",
        "backend": "torch",
        "quantization": "none",
    }
    states = {labels[0][1]: value for (name, labels), value in found.items() if name == "widebeam_engine_state"}
    assert states == {"starting": 0, "ready": 1, "draining": 0, "stopped": 0, "dead": 0}
    assert found["widebeam_wave_rows_limit", ()] == service.engine.config.max_wave_rows


@pytest.fixture(scope="module")
def everything(shared_small: Service) -> list[Metric]:
    """All metrics, those with labels that come with the first request too."""
    assert shared_small.post(RECOMMEND, {"input_ids": [7]}).status == 200
    return families(shared_small)


def exposed_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_the_document_lists_what_there_is(everything: list[Metric]) -> None:
    listed = {}
    for row in re.findall(r"^\| (`widebeam_.*) \|$", API, re.MULTILINE):
        name, kind, labels, unit, meaning = map(str.strip, row.split("|"))
        assert meaning, name
        listed[name.strip("`")] = (kind, frozenset(re.findall(r"`(\w+)`", labels)))
        suffix = re.search(r"_(seconds|tokens)(_total)?`$", name)
        assert suffix is None or suffix[1] == unit, name
    real = {}
    for family in everything:
        own = {label for sample in family.samples for label in sample.labels} - {"le"}
        real[exposed_name(family)] = (family.type, frozenset(own))
    assert listed == real


def test_names_and_texts_follow_the_conventions(everything: list[Metric]) -> None:
    """What `promtool check metrics` looks at."""
    other_units = r"(ms|millis|milliseconds|us|minutes|hours|kb|mb|gb|kilobytes|megabytes|percent|pct)"
    texts = [family.documentation for family in everything]
    assert len(set(texts)) == len(texts) and all(texts)
    for family in everything:
        assert re.fullmatch(r"widebeam(_[a-z]+)+", family.name), family.name
        words = family.name.split("_")
        assert not {"counter", "gauge", "histogram", "summary", "metric"} & set(words), "the type is no part of a name"
        assert not re.search(rf"_{other_units}(_|$)", family.name), "base units only"
        assert words[-1] not in ("total", "count", "sum", "bucket", "created")
        for sample in family.samples:
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            assert sample.name in {family.name + suffix for suffix in suffixes}
            assert not {"quantile", "job", "instance"} & set(sample.labels)
            assert all(re.fullmatch("[a-z_]+", label) for label in sample.labels)


def test_buckets_ascend_and_add_up(everything: list[Metric]) -> None:
    histograms = [family for family in everything if family.type == "histogram"]
    assert len(histograms) >= 13
    for family in histograms:
        series: dict[Any, list[tuple[float, float]]] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = tuple(item for item in sample.labels.items() if item[0] != "le")
                series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        counts = {
            tuple(sample.labels.items()): sample.value for sample in family.samples if sample.name.endswith("_count")
        }
        assert series and series.keys() == counts.keys()
        for labels, buckets in series.items():
            assert all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(buckets)), family.name
            assert buckets[-1] == (float("inf"), counts[labels])
            if family.name.endswith("_seconds"):
                assert buckets[0][0] == 0.001 and buckets[-2][0] == 30


def test_openmetrics_and_a_choice_of_names(service: Service) -> None:
    answer = service.call("GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    strict = {family.name for family in parse_openmetrics(answer.content.decode())}  # refuses what the format forbids
    plain = {family.name for family in families(service)}
    assert {name.removesuffix("_info") for name in plain} == strict
    chosen = families(service, "?name[]=widebeam_waves_total&name[]=widebeam_beam_rows_in_use")
    assert sorted(family.name for family in chosen) == ["widebeam_beam_rows_in_use", "widebeam_waves"]
