"""The SDK against the real server; test_retries.py and test_transport.py have servers that fail."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.http.service import MODEL_NAME, Service, running_service, until, wait_until
from widebeam import AsyncClient, Client, errors
from widebeam.config import Config
from widebeam.http.openai import ChatResponse
from widebeam.http.protocol import RecommendResponse
from widebeam.http.sglang import GenerateResponse
from widebeam.policies import PolicySpec
from widebeam.settings import parse

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def service(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    with running_service(checkpoint, catalog_file) as running:
        yield running
        running.check()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.url) as blocking:
        yield blocking


def ids_of(found: RecommendResponse) -> list[int | str]:
    """Without the scores, which may differ in the last digit between waves of different make-up."""
    return [item.id for item in found.items]


def run(program: str) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own, which has to succeed."""
    command = [sys.executable, "-X", "dev", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_recommend_is_typed(service: Service, client: Client) -> None:
    found = client.recommend(history=["item-1", "item-2"], n=3, fields=["title"], request_id="r-1")
    assert isinstance(found, RecommendResponse)
    raw = service.post("/v1/recommend", {"history": ["item-1", "item-2"], "n": 3, "fields": ["title"]}).json
    assert [(i.id, i.sid, i.metadata) for i in found.items] == [
        (i["id"], i["sid"], i["metadata"]) for i in raw["items"]
    ]
    assert found.items[0].score == pytest.approx(raw["items"][0]["score"], abs=1e-5)
    assert (found.id, found.model, found.catalog.name, found.normalizer) == ("r-1", MODEL_NAME, "items", "level")
    assert found.timing_ms.total > 0


def test_arguments_that_do_not_fit_are_told_of_this_class(client: Client) -> None:
    with pytest.raises(TypeError, match=r"^Client\.recommend\(\) takes 1 positional argument"):
        client.recommend(["item-3"])  # type: ignore[call-arg,arg-type]


def test_every_option_reaches_the_server(client: Client) -> None:
    by_spec = client.recommend(
        input_ids=np.array([7, 11, 30]),
        n=np.int64(2),
        policy=PolicySpec(name="scheduled", widths=(4, 8, 4)),
        catalog="items",
        normalizer="legal",
        length_penalty=0.0,
    )
    by_dict = client.recommend(
        input_ids=(7, 11, 30),
        n=2,
        policy={"name": "scheduled", "widths": [4, 8, 4]},
        normalizer="legal",
        length_penalty=0.0,
    )
    assert by_spec.items == by_dict.items
    assert by_spec.normalizer == "legal"
    assert all(item.score == pytest.approx(item.cum_logprob) for item in by_spec.items)
    with pytest.raises(errors.InvalidRequest) as caught:
        client.recommend(history=["ghost"], unknown_items="refuse")
    assert caught.value.code == "unknown_item"
    assert client.recommend(messages=[{"role": "user", "content": "a"}], n=1, beam_width=4).items


def test_generate_is_typed(service: Service, client: Client) -> None:
    """And loses nothing of what a server answers."""
    params = {"beam_width": 4, "n": 2}
    wanted = {"return_logprob": True, "top_logprobs_num": 20, "return_text_in_logprobs": True,
              "return_beam_details": True, "return_prompt_token_ids": True}  # fmt: skip
    found = client.generate("watched a", sampling_params=params, **wanted, rid="g-1")
    assert isinstance(found, GenerateResponse)
    raw = service.post("/generate", {"text": "watched a", "sampling_params": params, **wanted}).json
    plain, beams = msgspec.to_builtins(found), raw["meta_info"]["beam_results"]
    assert found.meta_info.id == "g-1"
    assert plain.pop("meta_info").keys() == raw.pop("meta_info").keys()  # whose times differ
    assert plain == raw
    assert [beam.output_ids for beam in found.beams] == [beam["output_ids"] for beam in beams]
    assert [beam.meta_info.items for beam in found.beams] == [beam["meta_info"]["items"] for beam in beams]
    assert [beam.meta_info.sequence_score for beam in found.beams] == pytest.approx(
        [beam["meta_info"]["sequence_score"] for beam in beams], abs=1e-5
    )
    assert msgspec.to_builtins(found.beams[1]).keys() == beams[1].keys()


def test_generate_lists_what_comes_in_lists(client: Client) -> None:
    batch = client.generate(input_ids=[[7], [8]], sampling_params={"n": 2}, return_logprob=True)
    assert isinstance(batch, list)
    assert [answer.meta_info.output_token_logprobs_length for answer in batch] == [3, 3]
    texts = client.generate(input_ids=[7], catalog="none", sampling_params={"n": 3, "max_new_tokens": 2})
    assert isinstance(texts, list)
    assert [(len(text.output_ids), text.beams) for text in texts] == [(2, [])] * 3


def test_chat_is_typed(service: Service, client: Client) -> None:
    messages = [{"role": "user", "content": "watched <a_9>"}]
    answer = client.chat(messages, beam_width=16, n=2, logprobs=True, top_logprobs=2, request_id="c-1")
    assert isinstance(answer, ChatResponse)
    raw = service.post("/v1/chat/completions", {"messages": messages, "beam_width": 16, "n": 2}).json
    assert [choice.text for choice in answer.choices] == [choice["message"]["content"] for choice in raw["choices"]]
    assert [choice.items for choice in answer.choices] == [choice["sglext"]["items"] for choice in raw["choices"]]
    assert answer.choices[0].score == pytest.approx(raw["choices"][0]["sglext"]["sequence_score"], abs=1e-5)
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2, 2]
        total = sum(token.logprob for token in choice.logprobs.content)
        assert choice.score == pytest.approx(total / 3, abs=1e-5)
    assert answer.id == "c-1"


def test_chat_draws_texts(client: Client) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.chat(input_ids=[7, 11], catalog="none", n=3, max_tokens=6, temperature=1.0, seed=seed)
        return [choice.text for choice in answer.choices]

    assert texts(1) == texts(1) != texts(2)
    cut = client.chat(input_ids=[7, 11], catalog="none", max_tokens=6, temperature=1.0, seed=1, stop=texts(1)[0][:3])
    assert cut.choices[0].text == "" and cut.choices[0].finish_reason == "stop"


def test_completions_of_several_prompts(client: Client) -> None:
    answer = client.completions([[7, 11], [8]], beam_width=4, n=2, logprobs=1)
    alone = client.completions([8], beam_width=4, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.items for choice in answer.choices[2:]] == [choice.items for choice in alone.choices]
    assert answer.choices[0].logprobs is not None and len(answer.choices[0].logprobs.tokens) == 3


async def test_abort_ends_a_call_for_good(service: Service) -> None:
    async with AsyncClient(service.url) as client:
        with service.held():
            call = asyncio.create_task(client.recommend(input_ids=[7], request_id="to-end"))
            await until(lambda: service.engine.stats().requests_in_flight == 1)
            assert await client.abort("another") == 0
            assert await client.abort("to-end") == 1
            with pytest.raises(errors.Aborted):
                await call


def test_a_stream_is_refused(client: Client) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        client.generate("a", stream=True)
    assert caught.value.param == "stream"


def test_models_and_health(client: Client) -> None:
    (card,) = client.models()
    assert (card.id, card.max_model_len) == (MODEL_NAME, 512)
    assert client.health().status == "ready"


def test_errors_have_the_servers_class_code_and_param(client: Client) -> None:
    with pytest.raises(errors.InvalidRequest) as bad:
        client.recommend(input_ids=[7], n=2, beam_width=1)
    assert (bad.value.status, bad.value.code, bad.value.param) == (400, "invalid_request", "n")
    assert "request id" in bad.value.__notes__[0]
    with pytest.raises(errors.NotFound) as missing:
        client.recommend(input_ids=[7], catalog="ghost")
    assert missing.value.code == "unknown_catalog"
    with pytest.raises(errors.InvalidRequest) as generate:
        client.generate("a", stop_me=True)
    assert (generate.value.code, generate.value.param) == ("unknown_field", "stop_me")
    with pytest.raises(errors.InvalidRequest, match="finite"):
        client.recommend(input_ids=[7], length_penalty=float("nan"))


def test_the_timeout_bounds_the_call_and_reaches_the_engine(service: Service, client: Client) -> None:
    with service.held():
        with pytest.raises(errors.DeadlineExceeded):
            client.recommend(input_ids=[7], timeout=0.1)
        wait_until(lambda: service.engine.stats().requests_in_flight == 0)  # the client may be the first to give up


def test_an_address_may_be_that_of_openais_sdk(service: Service) -> None:
    for ending in ("/v1", "/v1/"):
        with Client(service.url + ending) as client:
            assert client.models()[0].id == MODEL_NAME and client.health().status == "ready"


@pytest.mark.parametrize("timeout", [0, -1.5, float("nan")])
def test_a_timeout_in_which_nothing_can_be_answered_is_refused(service: Service, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be over 0 seconds"):
        Client(service.url, timeout=timeout)
    with Client(service.url) as client:
        with pytest.raises(ValueError, match=f"timeout must be over 0 seconds, not {timeout}"):
            client.recommend(input_ids=[7], timeout=timeout)
        assert client.recommend(input_ids=[7], n=1).items


def test_the_api_key_opens_the_server(
    checkpoint: Path, catalog_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("a-key-of-this-test\n")
    (tmp_path / "keys").chmod(0o600)
    with running_service(checkpoint, catalog_file, api_key_file=str(tmp_path / "keys")) as closed:
        with Client(closed.url, api_key="another-key-of-this-test") as client, pytest.raises(errors.Unauthorized):
            client.recommend(input_ids=[7], n=1)
        with Client(closed.url, api_key="a-key-of-this-test") as client:
            assert client.recommend(input_ids=[7], n=1).items
        monkeypatch.setenv("WIDEBEAM_API_KEY", "a-key-of-this-test")
        with Client(closed.url) as client:
            assert client.recommend(input_ids=[7], n=1).items
        with Client(closed.url, api_key="") as client, pytest.raises(errors.Unauthorized):
            client.models()


def test_the_clients_key_is_no_setting_of_the_server() -> None:
    assert parse(Config, ["model"], "serve", {"WIDEBEAM_API_KEY": "k"}) == parse(Config, ["model"], "serve", {})


async def test_many_calls_at_once(service: Service) -> None:
    async with AsyncClient(service.url) as client:
        prompts = [[7, 11 + index % 16] for index in range(40)]
        together = await asyncio.gather(*(client.recommend(input_ids=ids, n=2) for ids in prompts))
        alone = [await client.recommend(input_ids=ids, n=2) for ids in prompts]
    assert [ids_of(found) for found in together] == [ids_of(found) for found in alone]


async def test_cancelling_a_call_frees_the_request(service: Service) -> None:
    async with AsyncClient(service.url) as client:
        with service.held():
            call = asyncio.create_task(client.recommend(input_ids=[7]))
            await until(lambda: service.engine.stats().requests_in_flight == 1)
            call.cancel()
            await until(lambda: service.engine.stats().requests_in_flight == 0)
            with pytest.raises(asyncio.CancelledError):
                await call


@pytest.mark.parametrize("kind", [str, Path, Path.open], ids=["str", "path", "text file"])
def test_a_path_is_no_file_to_upload(service: Service, catalog_file: Path, kind: Callable[[Path], Any]) -> None:
    given = kind(catalog_file)
    with Client(service.url) as client, pytest.raises(TypeError, match=r"not (str|PosixPath|TextIOWrapper): .* path="):
        client.put_catalog("shop", file=given, format="jsonl")
    if hasattr(given, "close"):
        given.close()


async def test_closing_fails_what_runs_and_frees_it(service: Service) -> None:
    client = AsyncClient(service.url)
    with service.held():
        call = asyncio.create_task(client.recommend(input_ids=[7]))
        await until(lambda: service.engine.stats().requests_in_flight == 1)
        await client.close()
        with pytest.raises(errors.ServerUnreachable):
            await call
        await until(lambda: service.engine.stats().requests_in_flight == 0)
    with pytest.raises(RuntimeError, match="closed"):
        await client.models()


async def test_an_async_client_has_one_loop_at_a_time(service: Service) -> None:
    async with AsyncClient(service.url) as client:
        await client.models()
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, client.models())


def test_an_async_client_outlives_its_loop(service: Service) -> None:
    """In a process of its own, which ends with the connections of the first loop open."""
    program = (
        "import asyncio, widebeam\n"
        f"client = widebeam.AsyncClient({service.url!r})\n"
        "for _ in range(2): print(asyncio.run(client.health()).status)\n"
    )
    assert run(program).stdout.split() == ["ready", "ready"]


def test_the_twins_have_the_same_methods() -> None:
    def public(kind: type) -> dict[str, inspect.Signature]:
        members = inspect.getmembers(kind, inspect.isfunction)
        return {name: inspect.signature(member) for name, member in members if not name.startswith("_")}

    def parameters(kind: type) -> dict[str, list[inspect.Parameter]]:
        return {name: list(signature.parameters.values())[1:] for name, signature in public(kind).items()}

    assert parameters(Client) == parameters(AsyncClient)
    assert inspect.signature(Client.__init__) == inspect.signature(AsyncClient.__init__)


def test_a_client_works_from_many_threads_and_inside_a_loop(service: Service, client: Client) -> None:
    results: list[list[int | str]] = []

    def call() -> list[int | str]:
        return ids_of(client.recommend(input_ids=[7, 8], n=2))

    threads = [threading.Thread(target=lambda: results.append(call())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def notebook() -> list[int | str]:
        return call()

    results.append(asyncio.run(notebook()))
    assert len(results) == 9 and all(ids == results[0] for ids in results)


def test_closing_twice_is_fine(service: Service) -> None:
    client = Client(service.url)
    assert client.health().status == "ready"
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="this client is closed"):
        client.health()


def test_closing_from_another_thread_ends_a_call(service: Service) -> None:
    client = Client(service.url)
    caught: list[BaseException] = []

    def call() -> None:
        try:
            client.recommend(input_ids=[7])
        except errors.ServerUnreachable as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    with service.held():
        thread.start()
        wait_until(lambda: service.engine.stats().requests_in_flight == 1)
        client.close()
        thread.join(10)
    assert len(caught) == 1
    wait_until(lambda: service.engine.stats().requests_in_flight == 0)


def test_a_client_that_nobody_closed_leaves_no_thread_and_no_noise(service: Service) -> None:
    program = (
        "import gc, threading, widebeam\n"
        f"first, last = widebeam.Client({service.url!r}), widebeam.Client({service.url!r})\n"
        "print(first.health().status, last.health().status)\n"
        "del first; gc.collect()\n"
        "print([thread.name for thread in threading.enumerate()])\n"
    )
    done = run(program)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["ready ready", "['MainThread', 'widebeam-client']"]


def test_client_and_http_need_no_torch() -> None:
    modules = [
        "widebeam.client",
        *(f"widebeam.http.{path.stem}" for path in (ROOT / "widebeam/http").glob("[a-z]*.py")),
    ]
    program = (
        "import sys, importlib, json\n"
        "sys.modules.update(torch=None, transformers=None)\n"  # importing them raises
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "import widebeam; widebeam.Client, widebeam.AsyncClient, widebeam.EngineConfig\n"
        "print(json.dumps(len(sys.modules)))"
    )
    assert json.loads(run(program).stdout) > 0
