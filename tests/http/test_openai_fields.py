"""Every field that clients of OpenAI and vLLM can send: fine at its default, refused by name where it asks for more.

The tables are written from the dialects' own descriptions, not from the code under test.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams

from tests.http.service import Service
from tests.http.test_dialect_fields import IDS, demanding, neutral, pairs

CHAT_UNSUPPORTED: dict[str, tuple[list[Any], Any]] = {
    "audio": ([None], {"voice": "alloy", "format": "wav"}),
    "function_call": ([None, "none", "auto"], {"name": "f"}),
    "functions": ([None, []], [{"name": "f"}]),
    "modalities": ([None, ["text"]], ["text", "audio"]),
    "moderation": ([None], {"model": "m"}),
    "parallel_tool_calls": ([None, True, False], 2),
    "prediction": ([None], {"type": "content", "content": "x"}),
    "reasoning_effort": ([None, "none"], "high"),
    "response_format": ([None, {"type": "text"}], {"type": "json_object"}),
    "service_tier": ([None, "auto", "default"], "flex"),
    "stop": ([None, []], "\n"),  # with beams
    "store": ([None, False], True),
    "tool_choice": ([None, "none", "auto"], "required"),
    "tools": ([None, []], [{"type": "function", "function": {"name": "f"}}]),
    "top_logprobs": ([None, 0], 3),  # without logprobs
    "verbosity": ([None, "medium"], "high"),
    "web_search_options": ([None, {}], {"search_context_size": "low"}),
    # extensions of other servers
    "early_stopping": ([None, False], True),
    "allowed_token_ids": ([None, []], [1]),
    "add_generation_prompt": ([None, True], False),
    "min_tokens": ([None, 0], 2),  # with beams
    "best_of": ([None, 2], 3),
    "lora_path": ([None, ""], "adapter"),
    "json_schema": ([None], "{}"),
    "regex": ([None, ""], "x+"),
    "ebnf": ([None, ""], "root ::= x"),
    "stop_regex": ([None, "", []], "x+"),
    "structured_outputs": ([None, {}], {"regex": "x+"}),
    "return_hidden_states": ([None, False], True),
    "return_meta_info": ([None, False], True),
    "return_token_ids": ([None, False], True),
    "spaces_between_special_tokens": ([None, True], False),
}
CHAT_SUPPORTED: dict[str, list[Any]] = {
    "frequency_penalty": [None, 0, 1.0],
    "presence_penalty": [None, 0, 1.0],
    "logit_bias": [None, {}, {"7": 1}],
    "logprobs": [None, False, True],
    "max_completion_tokens": [None, 16],
    "max_tokens": [None, 16],
    "metadata": [None, {"a": "b"}],
    "model": [None, "any"],
    "n": [None, 1, 3],
    "prompt_cache_key": [None, "k"],
    "prompt_cache_retention": [None, "24h"],
    "prompt_cache_options": [None, {}],
    "safety_identifier": [None, "u"],
    "seed": [None, 7],
    "stream": [None, False, True],
    "stream_options": [None],
    "temperature": [None, 0, 1, 0.5],
    "top_p": [None, 1, 0.5],
    "user": [None, "u"],
    # extensions
    "beam_width": [None, 8],
    "use_beam_search": [None, True],
    "length_penalty": [None, 0.0],
    "ignore_eos": [None, True],
    "stop_token_ids": [None, [3]],
    "skip_special_tokens": [None, False],
    "top_k": [None, -1, 5],
    "chat_template_kwargs": [None, {}, {"enable_thinking": False}],
    "rid": [None, "r"],
    "cache_salt": [None, "s"],
    "extra_key": [None, "s"],
    "catalog": [None, "items"],
    "normalizer": [None, "legal"],
    "policy": [None, {"name": "fixed"}],
    "timeout_ms": [None, 20_000],
    "priority": [None, 0, 100, -100],
    "suppress_special_tokens": [None, False, True],
    "return_beam_details": [None, False, True],
    "no_stop_trim": [None, False, True],
    "include_stop_str_in_output": [None, False, True],
}
ONLY_IN_CHAT = {
    "audio", "function_call", "functions", "modalities", "moderation", "parallel_tool_calls", "prediction",
    "reasoning_effort", "tool_choice", "tools", "verbosity", "web_search_options", "add_generation_prompt",
    "top_logprobs", "max_completion_tokens", "chat_template_kwargs",
}  # fmt: skip
COMPLETION_UNSUPPORTED: dict[str, tuple[list[Any], Any]] = {
    **{name: row for name, row in CHAT_UNSUPPORTED.items() if name not in ONLY_IN_CHAT},
    "echo": ([None, False], True),
    "suffix": ([None, ""], "s"),
    "prompt_logprobs": ([None], 1),
    "prompt_embeds": ([None, []], "data"),
    "truncate_prompt_tokens": ([None], 5),
    "return_tokens_as_token_ids": ([None, False], True),
}
COMPLETION_SUPPORTED: dict[str, list[Any]] = {
    **{name: values for name, values in CHAT_SUPPORTED.items() if name not in ONLY_IN_CHAT},
    "logprobs": [None, 0, 20],
}


def chat(service: Service, fields: dict[str, Any]) -> Any:
    messages = [{"role": "user", "content": "a"}]
    return service.post("/v1/chat/completions", {"messages": messages, "n": 2, "use_beam_search": True, **fields})


def complete(service: Service, fields: dict[str, Any]) -> Any:
    return service.post("/v1/completions", {"prompt": IDS, "n": 2, "use_beam_search": True, **fields})


def test_the_completion_tables_cover_the_sdk() -> None:
    known = {**COMPLETION_UNSUPPORTED, **COMPLETION_SUPPORTED}
    assert set(CompletionParams.__annotations__) - {"prompt"} <= set(known)


@pytest.mark.parametrize(("name", "value"), neutral(COMPLETION_UNSUPPORTED) + pairs(COMPLETION_SUPPORTED))
def test_completions_accept(service: Service, name: str, value: Any) -> None:
    answer = complete(service, {name: value})
    assert answer.status == 200, answer.content


@pytest.mark.parametrize(("name", "value"), demanding(COMPLETION_UNSUPPORTED))
def test_completions_refuse_by_name(service: Service, name: str, value: Any) -> None:
    answer = complete(service, {name: value})
    assert answer.status == 400
    assert answer.json["error"]["param"] == name
    assert name in answer.json["error"]["message"]


OPENAI_OUT_OF_RANGE: dict[str, list[Any]] = {
    "stop": ["", [""], ["x"] * 17, "x" * 1025, [7]],
    "logit_bias": [{"64": 1}, {"a": 1}],
    "min_tokens": [-1, 513],
    "temperature": [-0.1],
    "seed": [2**63],
    "n": [0, 5001],
}


@pytest.mark.parametrize(("name", "value"), pairs(OPENAI_OUT_OF_RANGE))
def test_openai_fields_out_of_range(service: Service, name: str, value: Any) -> None:
    for answer in (chat(service, {name: value}), complete(service, {name: value})):
        assert answer.status == 400
        assert answer.json["error"]["param"].startswith(name)


@pytest.mark.parametrize(("ask", "limit"), [(chat, {"top_logprobs": 21}), (complete, {"logprobs": 21})])
def test_twenty_likely_tokens_at_most(service: Service, ask: Any, limit: dict[str, int]) -> None:
    answer = ask(service, {"logprobs": True, **limit})
    assert (answer.status, answer.json["error"]["param"]) == (400, *limit)


def test_the_chat_tables_cover_the_sdk() -> None:
    known = {**CHAT_UNSUPPORTED, **CHAT_SUPPORTED}
    assert set(ChatParams.__annotations__) - {"messages"} <= set(known)


@pytest.mark.parametrize(("name", "value"), neutral(CHAT_UNSUPPORTED) + pairs(CHAT_SUPPORTED))
def test_chat_accepts(service: Service, name: str, value: Any) -> None:
    answer = chat(service, {name: value})
    assert answer.status == 200, answer.content


@pytest.mark.parametrize(("name", "value"), demanding(CHAT_UNSUPPORTED))
def test_chat_refuses_by_name(service: Service, name: str, value: Any) -> None:
    answer = chat(service, {name: value})
    assert answer.status == 400
    assert answer.json["error"]["param"] == name
    assert name in answer.json["error"]["message"]


def test_chat_names_unknown_fields_and_parts(service: Service) -> None:
    answer = chat(service, {"beams": 4})
    assert (answer.status, answer.json["error"]["code"], answer.json["error"]["param"]) == (
        400,
        "unknown_field",
        "beams",
    )
    answer = chat(service, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})
    assert (answer.status, answer.json["error"]["param"]) == (400, "chat_template_kwargs.chat_template")
    image = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    answer = chat(service, {"messages": [{"role": "user", "content": image}]})
    assert answer.status == 400
    assert answer.json["error"]["param"] == "messages[0].content[0].type"
    answer = chat(service, {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]})
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].tool_calls")


@pytest.mark.parametrize("value", [101, -101, 1.5, "high", True])
def test_priorities_out_of_range(service: Service, value: Any) -> None:
    recommended = service.post("/v1/recommend", {"input_ids": IDS, "priority": value})
    generated = service.post("/generate", {"input_ids": IDS, "priority": value})
    fields = {"priority": value}
    for answer in (recommended, generated, chat(service, fields), complete(service, fields)):
        assert (answer.status, answer.json["error"]["param"]) == (400, "priority")
