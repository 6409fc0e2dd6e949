"""Replicas behind Ray Serve, on a real cluster of this machine: `make ray-test`."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import failover
import loadgen
import pytest

from tests import tiny
from tests.deploy.ray_cluster import Cluster, Load, application, running_cluster, wait_for
from tests.http.service import MODEL_NAME, Answer, Service, running_service

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: make ray-test has an environment with it", allow_module_level=True)

pytestmark = pytest.mark.timeout(400)
REPLICAS = 3
RECOMMEND = {"history": ["item-1", "item-2"], "n": 3}
SLOW = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "catalog": "none"}
TEXT = {"max_new_tokens": 4, "temperature": 0}
ID = {"x-request-id": "the-same"}
CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "watched a"}], "n": 4, "beam_width": 4}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def applications(checkpoint: Path, catalog_file: Path) -> list[dict[str, Any]]:
    """Three replicas at /; one that takes little, at /small; one to whose engine a long search is a hang, at /frail."""
    engine = {"model": str(checkpoint), "catalog": f"items={catalog_file}"}
    whole = application("whole", "/", engine, replicas=REPLICAS)
    whole["args"]["server"] = {"served_model_name": MODEL_NAME}
    small = application("small", "/small", engine | {"max_waiting_requests": 2, "max_waiting_rows": 16},
                        max_queued_requests=1, retry_after_s=7, max_replicas=2, target_rows=4)  # fmt: skip
    frail = application("frail", "/frail", engine | {"hang_timeout_s": 0.001}, health_check_period_s=0.5)
    return [whole, small, frail]


@pytest.fixture(scope="module")
def deployed(cluster: Cluster, applications: list[dict[str, Any]]) -> Cluster:
    cluster.apply(*applications)
    wait_for(lambda: cluster.replica_of(prefix="/small") is not None, 120)
    wait_for(lambda: cluster.replica_of(prefix="/frail") is not None, 120)
    wait_for(lambda: len(cluster.replicas()) == REPLICAS, 120)
    return cluster


@pytest.fixture(scope="module")
def plain(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    """The same server without Ray."""
    with running_service(checkpoint, (f"items={catalog_file}",)) as service:
        yield service


VOLATILE = {"timing_ms", "e2e_latency", "response_sent_to_client_ts", "created", "made_at"}
ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/v1/recommend", RECOMMEND),
    ("POST", "/v1/recommend", RECOMMEND | {"n": -1}),
    ("POST", "/v1/recommend", b"{"),
    ("POST", "/v1/recommend", b"x" * (5 << 20)),
    ("GET", "/v1/recommend", None),
    ("POST", "/generate", {"text": "watched a", "sampling_params": {"n": 4, "beam_width": 4}}),
    ("POST", "/generate", {"text": "watched a", "sampling_params": {"n": 4, "beam_width": 4}, "stream": True}),
    ("POST", "/generate", {"text": ["watched a", "b"], "catalog": "none", "sampling_params": TEXT}),
    ("POST", "/generate", {"text": 3}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True}),
    ("POST", "/v1/chat/completions", CHAT | {"model": "other"}),
    ("POST", "/v1/completions", {"model": MODEL_NAME, "prompt": "watched a", "n": 2, "beam_width": 4}),
    ("POST", "/tokenize", {"prompt": "watched a", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [7, 9]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/no%2Fsuch", None),
    ("GET", "/v1/catalogs", None),
    ("GET", "/v1/catalogs/items", None),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/health_generate", None),
    ("GET", "/model_info", None),
    ("GET", "/openapi.json", None),
    ("POST", "/abort_request", {"rid": "nobody"}),
    ("POST", "/flush_cache", None),
    ("GET", "/nowhere?at=all", None),
    ("PUT", "/v1/models/../catalogs/items", {}),
]


def scrubbed(value: Any) -> Any:
    """Without what differs from one answer to the next."""
    if isinstance(value, dict):
        return {name: scrubbed(part) for name, part in value.items() if name not in VOLATILE}
    return [scrubbed(part) for part in value] if isinstance(value, list) else value


def facts(answer: Answer) -> tuple[Any, ...]:
    """What an answer says: its status, those headers that are the server's, and its content as far as it is fixed."""
    kind = answer.headers.get("content-type", "")
    content: Any = answer.content.decode()
    if kind.startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
        content = [event if event == "[DONE]" else scrubbed(json.loads(event)) for event in events]
    elif kind.startswith("application/json"):
        content = scrubbed(json.loads(content))
    headers = {name: answer.headers.get(name) for name in ("allow", "cache-control", "x-request-id", "retry-after")}
    return answer.status, kind, headers, content


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route[0]} {route[1]} {str(route[2])[:40]}")
def test_a_route_answers_as_without_ray(deployed: Cluster, plain: Service, route: tuple[str, str, Any]) -> None:
    assert facts(deployed.call(*route, headers=ID)) == facts(plain.call(*route, headers=ID))


def test_an_application_answers_behind_its_prefix(deployed: Cluster, plain: Service) -> None:
    behind = deployed.call("POST", "/small/v1/recommend", RECOMMEND)
    assert behind.json["items"] == plain.post("/v1/recommend", RECOMMEND).json["items"]


@pytest.mark.parametrize("path", ["/v1/catalogs/items", "/small/v1/catalogs/items", "/v1/%63atalogs/items"])
def test_a_change_of_one_replicas_catalog_is_refused(deployed: Cluster, path: str) -> None:
    for answer in (deployed.call("POST", f"{path}/items", {"upsert": []}, ID), deployed.call("DELETE", path, None, ID)):
        assert (answer.status, answer.json["error"]["code"]) == (409, "one_of_several_replicas")
        assert answer.json["error"]["request_id"] == "the-same"


def test_one_session_meets_one_replica_and_all_sessions_meet_all(deployed: Cluster) -> None:
    for session in ("a", "b", "c"):
        assert len({deployed.replica_of(session) for _ in range(10)}) == 1
    assert len(deployed.replicas()) == REPLICAS


def test_a_caller_that_goes_away_ends_its_search(deployed: Cluster) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", deployed.port)
    connection.request("POST", "/small/generate", json.dumps(SLOW))
    wait_for(lambda: "widebeam_requests_in_flight 1" in metrics(deployed), 10)
    connection.close()
    wait_for(lambda: 'outcome="cancelled",route="/generate"' in metrics(deployed), 20)


def metrics(cluster: Cluster) -> str:
    return cluster.call("GET", "/small/metrics").content.decode()


def test_too_much_is_refused_by_the_engine_in_its_words_and_by_the_proxy_in_its_own(deployed: Cluster) -> None:
    answers: list[Answer] = []
    body = RECOMMEND | {"beam_width": 16}
    senders = [
        threading.Thread(target=lambda: answers.append(deployed.call("POST", "/small/v1/recommend", body)))
        for _ in range(24)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    refused = [answer for answer in answers if answer.status == 429]
    assert len(refused) < len(answers) and {answer.status for answer in answers} == {200, 429}
    by_engine = [answer for answer in refused if answer.headers["content-type"] == "application/json"]
    assert all(answer.json["error"]["code"] == "overloaded" for answer in by_engine)
    by_proxy = [answer for answer in refused if answer not in by_engine]
    assert by_proxy and {answer.headers["retry-after"] for answer in by_proxy} == {"7"}


def test_rows_in_flight_bring_another_replica(deployed: Cluster) -> None:
    assert len(deployed.replicas("/small")) == 1
    with Load(deployed, "/small/v1/recommend", RECOMMEND | {"beam_width": 16}).running(4):
        wait_for(lambda: len(deployed.replicas("/small", tries=10)) == 2, 240)


def test_a_replica_whose_engine_died_is_replaced(deployed: Cluster) -> None:
    before = deployed.replica_of(prefix="/frail")
    wide = {"n": 64, "beam_width": 64, "max_new_tokens": 400, "ignore_eos": True}
    answer = deployed.call("POST", "/frail/generate", {"input_ids": [5], "sampling_params": wide, "catalog": "none"})
    assert (answer.status, answer.json["error"]["code"]) == (503, "engine_dead")
    wait_for(lambda: deployed.replica_of(prefix="/frail") not in (before, None), 60)


def test_a_killed_replica_takes_only_its_own_requests_with_it(
    deployed: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """And only its own sessions move. Prints what it cost, and for how long."""
    search = loadgen.Request("/v1/recommend", json.dumps(RECOMMEND).encode())
    victim = deployed.processes("whole")[0]
    url = f"http://127.0.0.1:{deployed.port}"
    found = asyncio.run(
        failover.measure(url, search, lambda: os.kill(victim, signal.SIGKILL), replicas=REPLICAS, concurrency=6)
    )
    with capsys.disabled():
        print(f"\n{failover.markdown(found)}")
    assert found["requests"] > 100
    assert found["failed_elsewhere"] == found["moved_elsewhere"] == found["unanswered"] == 0
    assert set(found["failed"]) <= {"500", "503"}
    assert found["failed_on_killed"] <= 6, "more than were in flight"
    assert max(found["moved_away_share"], found["moved_back_share"]) <= 1 / REPLICAS + 0.1
    assert found["first_answer_s"] is not None and found["as_many_servers_s"] is not None


def test_a_new_catalog_comes_without_a_failed_or_mixed_answer(
    deployed: Cluster, applications: list[dict[str, Any]], tmp_path: Path
) -> None:
    other = tiny.save_catalog(tmp_path / "items.jsonl", seed=1)
    other.write_text(other.read_text().replace('"item-', '"other-'))
    before = deployed.replicas()
    whole, *rest = applications
    engine = whole["args"]["engine"] | {"catalog": f"items={other}"}
    changed = whole | {"args": whole["args"] | {"engine": engine}}
    body = {"prompt": "watched a next", "n": 5}
    with Load(deployed, "/v1/recommend", body).running(4) as load:
        wait_for(lambda: len(load.answers) > 20, 30)
        deployed.apply(changed, *rest)
        wait_for(lambda: len(found := deployed.replicas()) == REPLICAS and not found & before, 120)
        switched = len(load.answers)
        wait_for(lambda: len(load.answers) > switched + 20, 30)
    assert not load.broken and {answer.status for answer in load.answers} == {200}
    sources = [{item["id"].split("-")[0] for item in answer.json["items"]} for answer in load.answers]
    assert all(len(source) == 1 for source in sources)
    assert sources[0] == {"item"} and all(source == {"other"} for source in sources[switched + 4 :])


def test_an_update_that_cannot_start_leaves_the_others_at_work(
    deployed: Cluster, applications: list[dict[str, Any]]
) -> None:
    whole, *rest = applications
    broken = whole | {"args": whole["args"] | {"engine": whole["args"]["engine"] | {"catalog": "/no/such/file.jsonl"}}}
    with Load(deployed, "/v1/recommend", {"prompt": "watched a next", "n": 5}).running(2) as load:
        deployed.apply(broken, *rest)
        wait_for(lambda: len(deployed.replicas()) == REPLICAS - 1, 60)
        done = len(load.answers)
        wait_for(lambda: len(load.answers) > done + 50, 60)
        deployed.apply(whole, *rest)
        wait_for(lambda: len(deployed.replicas()) == REPLICAS, 120)
    assert not load.broken and {answer.status for answer in load.answers} == {200}


PUBLISH = """
import json, sys
import ray
from ray import serve
from widebeam.deploy.publishing import publish_catalog
from widebeam.errors import CatalogError

address, what, path = sys.argv[1:]
ray.init(address=address, namespace="serve", log_to_driver=False)
handle = serve.get_app_handle("whole")
try:
    if what == "publish":
        print(json.dumps(publish_catalog(handle, path, "items")))
    elif what == "load on one":
        print(json.dumps(handle.load_catalog.remote(path, "items").result()))
    else:
        found = handle.broadcast("commit_catalog", "items", int(path)).results(return_exceptions=True)
        print(json.dumps([str(one) for one in found]))
except CatalogError as error:
    print(json.dumps(str(error)))
"""


def published(cluster: Cluster, path: Path | int, what: str = "publish") -> Any:
    """What a process of its own gets from publish_catalog: a version, or why there is none."""
    command = [sys.executable, "-c", PUBLISH, cluster.address, what, str(path)]
    done = subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, timeout=120, check=False, cwd=cluster.folder
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def settled(deployed: Cluster, applications: list[dict[str, Any]]) -> Cluster:
    """Whatever was updated before, all replicas are those of the first settings."""

    def is_first() -> bool:
        answers = [
            deployed.call("POST", "/v1/recommend", {"prompt": "a", "n": 3}, {"x-session-id": str(user)})
            for user in range(30)
        ]
        return all(answer.status == 200 and answer.json["items"][0]["id"].startswith("item-") for answer in answers)

    deployed.apply(*applications)
    wait_for(lambda: is_first() and len(deployed.replicas()) == REPLICAS, 120)
    return deployed


def test_a_catalog_is_published_to_all_replicas_or_to_none(settled: Cluster, tmp_path: Path) -> None:
    """Under load: once it is announced nobody answers from the version before. What one replica refuses, none has."""
    body = {"prompt": "watched a next", "n": 5}
    for number in (5, 6, 7):
        (tmp_path / str(number)).mkdir()
    files = {number: tiny.save_catalog(tmp_path / f"{number}" / "items.jsonl", seed=number) for number in (5, 6, 7)}
    for number, file in files.items():
        file.write_text(file.read_text().replace('"item-', f'"of{number}-'))
        (file.parent / "items.catalog.json").write_text(json.dumps({"version": number}))
    files[6].write_text(files[6].read_text() + "{")
    before = settled.replicas()
    with Load(settled, "/v1/recommend", body).running(4) as load:
        wait_for(lambda: len(load.answers) > 20, 30)
        assert published(settled, files[5]) == 5
        announced = len(load.answers)
        wait_for(lambda: len(load.answers) > announced + 40, 30)
        refused = published(settled, files[6])
        assert refused.startswith("catalog 'items' is not published, and nothing has changed: 3 of 3 replicas: ")
        assert "items.jsonl:61" in refused
        assert "is at version 5: 5 is not newer" in published(settled, files[5])
        failed = len(load.answers)
        wait_for(lambda: len(load.answers) > failed + 40, 30)
        one_replica = {"min_catalog_version": 6} | body
        assert {settled.call("POST", "/v1/recommend", one_replica).status for _ in range(10)} == {503}
        assert published(settled, files[7]) == 7
        again = len(load.answers)
        wait_for(lambda: len(load.answers) > again + 40, 30)
        assert {settled.call("POST", "/v1/recommend", one_replica).status for _ in range(10)} == {200}
    assert not load.broken and {answer.status for answer in load.answers} == {200}
    assert settled.replicas() == before, "none was replaced"
    versions = [answer.json["catalog"]["version"] for answer in load.answers]
    for answer, version in zip(load.answers, versions, strict=True):
        assert {item["id"].startswith(f"of{version}-") for item in answer.json["items"]} == {version != 1}
    assert versions[0] == 1
    assert set(versions[announced + 4 : again]) <= {5, 7} and 7 not in versions[:failed]
    assert set(versions[again + 4 :]) == {7}, "four were under way"


def test_what_one_replica_refuses_none_has(deployed: Cluster, tmp_path: Path) -> None:
    """One is ahead of the others, which is set right by a version that is newer than all."""
    files = {}
    for number in range(20, 24):
        files[number] = tiny.save_catalog(tmp_path / "items.jsonl").rename(tmp_path / f"{number}.jsonl")
        (tmp_path / f"{number}.catalog.json").write_text(json.dumps({"version": number}))

    def versions() -> set[int]:
        answers = [
            deployed.call("POST", "/v1/recommend", {"input_ids": [7]}, {"x-session-id": str(user)})
            for user in range(30)
        ]
        return {answer.json["catalog"]["version"] for answer in answers}

    assert published(deployed, files[20]) == 20 and versions() == {20}
    assert published(deployed, files[22], "load on one") == 22 and versions() == {20, 22}
    refused = published(deployed, files[21])
    assert "nothing has changed: 1 of 3 replicas: " in refused and "21 is not newer" in refused
    assert versions() == {20, 22}
    assert all("21 of catalog 'items' is not staged" in error for error in published(deployed, 21, "commit"))
    assert published(deployed, files[23]) == 23 and versions() == {23}
