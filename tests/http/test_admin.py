"""Models, health, facts and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http.service import MODEL_NAME, Service, running_service
from widebeam.config import EngineConfig, ServerConfig
from widebeam.engine.engine import Engine
from widebeam.http.server import Server


def samples(service: Service) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = service.get("/metrics")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.content.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_models(service: Service, checkpoint: Path) -> None:
    found = service.get("/v1/models").json
    assert found["object"] == "list"
    (card,) = found["data"]
    assert card == service.get(f"/v1/models/{MODEL_NAME}").json
    assert {key: card[key] for key in card if key != "created"} == {
        "id": MODEL_NAME,
        "object": "model",
        "owned_by": "widebeam",
        "root": str(checkpoint),
        "parent": None,
        "max_model_len": 512,
    }
    missing = service.get("/v1/models/org/other")
    assert missing.status == 404
    assert missing.json["error"] == {
        "message": "the model 'org/other' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_health_and_facts(service: Service) -> None:
    for path in ("/health", "/ready", "/health_generate"):
        assert (service.get(path).status, service.get(path).json) == (200, {"status": "ready"})
    info = service.get("/model_info").json
    assert info == service.get("/get_model_info").json
    assert info["is_generation"] is True and info["served_model_name"] == MODEL_NAME
    assert info["model_path"] == info["tokenizer_path"] == service.engine.config.model
    assert info["architectures"] == ["Qwen3ForCausalLM"]
    facts = service.get("/server_info").json
    assert set(facts) == set(service.get("/get_server_info").json)
    assert facts["catalogs"] == ["items"] and facts["max_beam_width"] == 5000 and facts["port"] == 0
    (state,) = facts["internal_states"]
    assert state["requests_in_flight"] == 0 and state["requests_done"] > 0


async def test_health_while_starting(checkpoint: Path) -> None:
    """The server listens before the model is loaded."""
    engine = Engine(EngineConfig(model=str(checkpoint), device="cpu"))
    server = Server(engine, ServerConfig(port=0))
    await server.start()
    try:
        async with aiohttp.ClientSession(server.url) as session:
            for path in ("/health", "/ready"):
                async with session.get(path) as response:
                    assert (response.status, await response.json()) == (503, {"status": "starting"})
            async with session.get("/metrics") as response:
                assert 'widebeam_engine_state{state="starting"} 1.0' in await response.text()
            for path in ("/v1/recommend", "/generate", "/v1/chat/completions"):
                async with session.post(path, data=b"never read") as response:
                    assert response.status == 503
                    assert int(response.headers["Retry-After"]) >= 1
                    assert (await response.json())["error"]["code"] == "not_ready"
            async with session.get("/v1/models") as response:
                assert response.status == 503
    finally:
        await engine.stop()
        await server.stop()


@pytest.fixture(scope="module")
def shared_small(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    with running_service(checkpoint, catalog_file) as service:
        yield service


def test_metrics_count_what_happened(shared_small: Service) -> None:
    service = shared_small
    before = samples(service)
    service.post("/v1/recommend", {"input_ids": [7, 8], "n": 2})
    service.post("/v1/recommend", {"input_ids": [], "n": 2})
    service.get("/nowhere")
    after = samples(service)

    def grown(name: str, **labels: str) -> float:
        key = (f"widebeam_{name}", tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    assert grown("requests_total", route="/v1/recommend", outcome="ok") == 1
    assert grown("requests_total", route="/v1/recommend", outcome="invalid_request") == 1
    assert grown("requests_total", route="unmatched", outcome="not_found") == 1
    assert grown("request_seconds_count", route="/v1/recommend") == 2
    assert grown("queue_seconds_count") == grown("prefill_seconds_count") == grown("decode_seconds_count") == 1
    assert grown("prompt_tokens_total") == 2
    assert grown("generated_tokens_total") == 6
    assert grown("requests_done_total") == grown("waves_total") == 1
    assert after[("widebeam_engine_state", (("state", "ready"),))] == 1
    assert grown("waves_by_levels_total", levels="8") == 1 and grown("waves_by_levels_total", levels="512") == 0
    for budget in ("requests", "rows", "row_levels", "tokens"):
        assert grown("requests_refused_by_total", budget=budget) == 0
        assert after[(f"widebeam_{budget}_in_flight", ())] == 0
    for name in ("jobs_overtaken_total", "jobs_aged_total", "requests_waiting", "rows_waiting", "tokens_waiting"):
        assert after[(f"widebeam_{name}", ())] == 0
    assert after[("widebeam_wave_rows_limit", ())] == service.engine.config.max_wave_rows
    assert after[("widebeam_retry_after_seconds", ())] == 0
    assert after[("widebeam_context_pages_used", ())] == 0
    assert after[("widebeam_context_pages", ())] > 0
    smallest = min(float(dict(labels)["le"]) for name, labels in after if name == "widebeam_request_seconds_bucket")
    assert smallest == 0.001
