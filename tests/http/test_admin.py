"""Models, health and facts."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from tests.http.service import MODEL_NAME, Service
from widebeam.config import EngineConfig, ServerConfig
from widebeam.engine.engine import Engine
from widebeam.http.server import Server


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
    chosen = {name: facts[name] for name in ("device", "dtype", "kv_cache_dtype", "attention_backend", "quantization")}
    assert chosen == {
        "device": "cpu", "dtype": "float32", "kv_cache_dtype": "float32", "attention_backend": "torch",
        "quantization": "none",
    }  # fmt: skip
    (state,) = facts["internal_states"]
    for budget, most in state["in_flight_limits"].items():
        assert facts[f"max_waiting_{budget}"] == most
    assert facts["max_context_len"] == 512 and facts["max_total_tokens"] >= facts["max_wave_tokens"]
    assert facts["beam_kv_tokens"] == 4 * facts["max_wave_rows"]
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
