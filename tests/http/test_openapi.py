"""GET /openapi.json says what is true: of the routes, of requests that fit its schemas, and of the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from aiohttp import hdrs
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks

from tests.http.service import Service, running_service
from widebeam.config import ServerConfig
from widebeam.engine.engine import Engine
from widebeam.http import openai, sglang
from widebeam.http.app import build_app
from widebeam.http.auth import Keyring
from widebeam.http.openapi import OPERATIONS, describe

OPEN = describe(Keyring())


async def test_every_route_is_described() -> None:
    engine = Engine("nowhere")
    routes = build_app(engine, ServerConfig()).router.routes()
    await engine.stop()
    assert set(OPERATIONS) == {
        (route.method, route.resource.canonical)
        for route in routes
        if route.resource is not None and route.method != hdrs.METH_HEAD
    }


def test_the_document_is_valid() -> None:
    for keyring in (Keyring(), Keyring(user=(b"",)), Keyring(admin=(b"",)), Keyring((b"",), (b"",))):
        document = describe(keyring)
        schemathesis.openapi.from_dict(document).validate()
        for schema in document["components"]["schemas"].values():
            jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema)
    with pytest.raises(jsonschema_rs.ValidationError):
        schemathesis.openapi.from_dict(OPEN | {"info": {}}).validate()


def test_fields_keys_and_headers_are_described() -> None:
    schemas = OPEN["components"]["schemas"]
    assert schemas["RecommendRequest"]["properties"]["history"]["description"].startswith("Item ids, oldest first")
    sampling = schemas["SamplingParams"]["properties"]
    assert sampling["max_new_tokens"]["description"].startswith("Unset: 128")
    assert sampling["sampling_seed"]["description"].startswith("The same seed draws the same texts")
    assert (
        "length ** length_penalty None: 1.0"
        in schemas["RecommendRequest"]["properties"]["length_penalty"]["description"]
    )
    fields = [field for schema in schemas.values() for field in schema.get("properties", {}).values()]
    assert sum("description" in field for field in fields) > 100
    recommend = OPEN["paths"]["/v1/recommend"]["post"]
    assert OPEN["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert recommend["security"] == [{}, {"key": []}] and {"401", "403"} <= set(recommend["responses"])
    assert describe(Keyring(user=(b"",)))["paths"]["/v1/recommend"]["post"]["security"] == [{"key": []}]
    assert "security" not in OPEN["paths"]["/health"]["get"]
    assert {"x-request-id", "x-catalog-version"} == set(recommend["responses"]["200"]["headers"])
    assert "x-session-id" in {parameter["name"] for parameter in recommend["parameters"]}


# Requests made up from the document


@pytest.fixture(scope="module")
def small(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    """Limits so low that no search takes long, whatever is asked for."""
    limits = {"max_levels": 6, "max_beam_width": 32, "max_context_len": 64}
    with running_service(checkpoint, catalog_file, **limits) as service:
        yield service
        service.check()


MADE_UP = [result.ok() for result in schemathesis.openapi.from_dict(OPEN).get_all_operations()]
CONFORMS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]
OTHER_PROMPTS = {"history", "prompt", "messages", "text"}
LEFT_OUT = {
    "/v1/recommend": {"min_catalog_version", "fields"},
    "/generate": {*sglang.GENERATE_NEUTRAL, "min_catalog_version", "rid", "return_logprob"},
    "/v1/completions": {*openai.COMPLETION_NEUTRAL, "min_catalog_version", "stream_options", "best_of"},
    "/v1/chat/completions": {*openai.CHAT_NEUTRAL, "min_catalog_version", "stream_options", "best_of"},
}
"""Fields of which nearly every made-up value is well-formed and refused."""


def send(case: Any, service: Service) -> int:
    answer = case.call(base_url=service.url)
    refused = [] if answer.status_code == 413 else [checks.negative_data_rejection]  # it takes 413 for no refusal
    case.validate_response(answer, checks=CONFORMS + refused)
    made_up = answer.status_code == 504 or "catalog_version_not_ready" in answer.text  # a time limit, or a version
    assert answer.status_code < 500 or made_up, answer.text
    return int(answer.status_code)


def made_up(examples: int) -> Any:
    """The same few cases in each run; a failure is shown as it was found."""
    return settings(
        max_examples=examples, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", MADE_UP, ids=lambda operation: operation.label)
def test_answers_are_as_described(small: Service, operation: Any, mode: GenerationMode) -> None:
    """To requests that fit the document, and to such as break it in one place: those are refused."""

    @made_up(15 if operation.body else 4)
    @given(operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        send(case, small)

    run()


@pytest.mark.parametrize("operation", [op for op in MADE_UP if op.path in LEFT_OUT], ids=lambda op: op.label)
def test_searches_that_fit_are_answered(small: Service, operation: Any) -> None:
    """With a prompt in place of made-up ones, and without what no catalog or server is likely to have."""
    statuses = []
    prompt = {"prompt" if operation.path == "/v1/completions" else "input_ids": [7, 11]}
    left_out = OTHER_PROMPTS | LEFT_OUT[operation.path] | {"catalog", "policy", "timeout_ms"}

    @made_up(30)
    @given(operation.as_strategy())
    def run(case: Any) -> None:
        case.body = {name: value for name, value in case.body.items() if name not in left_out} | prompt
        case.headers.pop("x-request-timeout-ms", None)
        statuses.append(send(case, small))

    run()
    assert statuses.count(200) >= 10, statuses
