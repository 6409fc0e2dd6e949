"""Every field that SGLang's and OpenAI's clients can send: fine at its default, refused by name where it asks for more.

The tables are written from the dialects' own descriptions, not from the code under test.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

from tests.http.service import Service

IDS = [7, 11, 30]

# field: (defaults and other neutral values, a value that asks for something)
GENERATE_UNSUPPORTED: dict[str, tuple[list[Any], Any]] = {
    "input_embeds": ([None], [[0.5]]),
    "session_id": ([None], "s"),
    "session_params": ([None, {}], {"id": "s"}),
    "log_metrics": ([True, None], False),
    "no_logs": ([False, None], True),
    "logprob_start_len": ([-1, None], 0),
    "top_logprobs_num": ([0, None], 5),
    "token_ids_logprob": ([None, []], [1]),
    "return_text_in_logprobs": ([False], True),
    "return_flat_raw_top_logprobs": ([False], True),
    "return_flat_raw_output_top_logprobs": ([False], True),
    "return_flat_raw_top_logprobs_b64": ([False], True),
    "return_sampling_mask": ([None, False], True),
    "sampling_logprobs_mode": ([None, ""], "raw"),
    "return_entropy": ([False], True),
    "return_hidden_states": ([False, None], True),
    "return_routed_experts": ([False], True),
    "routed_experts_start_len": ([0], 3),
    "return_indexer_topk": ([False], True),
    "return_bytes": ([False], True),
    "image_data": ([None, []], ["http://x/y.png"]),
    "video_data": ([None, []], ["v"]),
    "audio_data": ([None, []], ["a"]),
    "mm_hashes": ([None], ["h"]),
    "mm_content_hashes": ([None], ["h"]),
    "modalities": ([None, []], ["image"]),
    "use_audio_in_video": ([False, None], True),
    "video_config": ([None, {}], {"fps": 1}),
    "max_dynamic_patch": ([None], 4),
    "min_dynamic_patch": ([None], 1),
    "image_max_dynamic_patch": ([None], 4),
    "video_max_dynamic_patch": ([None], 4),
    "images_config": ([None, {}], {"a": 1}),
    "mm_processor_kwargs": ([None, {}], {"a": 1}),
    "lora_path": ([None, ""], "adapter"),
    "lora_id": ([None], "adapter"),
    "custom_logit_processor": ([None, ""], "code"),
    "positional_embed_overrides": ([None], {"a": 1}),
    "kv_hints": ([None], {"a": 1}),
    "background": ([False], True),
    "require_reasoning": ([False], True),
    "max_thinking_tokens": ([None], 10),
    "watermark": ([None], {"key": "k"}),
    "bootstrap_host": ([None], "h"),
    "bootstrap_port": ([None], 1),
    "bootstrap_room": ([None], 1),
    "bootstrap_pair_key": ([None], "k"),
    "decode_tp_size": ([None], 2),
    "routed_dp_rank": ([None], 1),
    "data_parallel_rank": ([None], 1),
    "disagg_prefill_dp_rank": ([None], 1),
    "need_wait_for_mm_inputs": ([False, None], True),
    "num_items_assigned": ([None], {"image": [1]}),
    "encoder_urls": ([None, []], ["http://x"]),
    "multi_item_delimiter_indices": ([None, []], [1]),
    "token_indices_to_pool": ([None, []], [1]),
}
GENERATE_SUPPORTED: dict[str, list[Any]] = {
    "rid": [None, "my-id"],
    "stream": [None, False],
    "return_logprob": [None, False, True],
    "return_prompt_token_ids": [False, True],
    "priority": [None, 0, 100, -100],
    # labels: they ask nothing of the answer
    "extra_key": [None, "tenant"],
    "cache_salt": [None, "salt"],
    "routing_key": [None, "user-1"],
    "conversation_id": [None, "c"],
    "custom_labels": [None, {"team": "a"}],
    "external_trace_header": [None, {"traceparent": "00"}],
    "received_time": [None, 1.5],
}
SAMPLING_UNSUPPORTED: dict[str, tuple[list[Any], Any]] = {
    "min_new_tokens": ([0, None], 2),
    "stop": ([None, "", []], ["\n"]),
    "stop_regex": ([None, "", []], "x+"),
    "json_schema": ([None, ""], "{}"),
    "regex": ([None, ""], "x+"),
    "ebnf": ([None, ""], "root ::= x"),
    "structural_tag": ([None, ""], "{}"),
    "spaces_between_special_tokens": ([True, None], False),
    "stream_interval": ([None, 1], 8),
    "custom_params": ([None, {}], {"a": 1}),
    "watermark": ([None], {"key": "k"}),
}
SAMPLING_SUPPORTED: dict[str, list[Any]] = {
    "max_new_tokens": [None, 128],
    "stop_token_ids": [None, [], [5]],
    "temperature": [None, 0, 1.0, 0.7],
    "top_p": [None, 1.0, 0.5],
    "top_k": [None, -1, 2**30, 50],
    "min_p": [None, 0.0, 0.1],
    "frequency_penalty": [None, 0.0, 2],
    "presence_penalty": [None, 0.0, -2],
    "repetition_penalty": [None, 1.0, 2],
    "n": [None, 1, 2],
    "beam_width": [None, 1, 4],
    "ignore_eos": [None, False, True],
    "skip_special_tokens": [None, True, False],
    "no_stop_trim": [None, False, True],
    "logit_bias": [None, {}, {"7": 1.0}],
    "sampling_seed": [None, 42],
    "use_beam_search": [None, False, True],
}
OUT_OF_RANGE: dict[str, list[Any]] = {
    "max_new_tokens": [0, -1, 513, 1.5, "3"],
    "temperature": [-0.1, "hot"],
    "top_p": [0, 1.1],
    "top_k": [-2],
    "min_p": [-0.1, 1.1],
    "frequency_penalty": [2.1, -2.1],
    "presence_penalty": [2.1],
    "repetition_penalty": [0, 2.1],
    "n": [0, 5001],
    "beam_width": [0, -1, 5001],
    "ignore_eos": ["yes", 1],
    "stop_token_ids": [[-1], list(range(65)), "x"],
    "sampling_seed": [2**63],
}


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def neutral(table: dict[str, tuple[list[Any], Any]]) -> list[tuple[str, Any]]:
    return pairs({name: values for name, (values, _) in table.items()})


def demanding(table: dict[str, tuple[list[Any], Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, (_, value) in table.items()]


def generate(service: Service, fields: dict[str, Any], sampling: dict[str, Any]) -> Any:
    return service.post("/generate", {"input_ids": IDS, "sampling_params": {"beam_width": 2, **sampling}, **fields})


@pytest.mark.parametrize(("name", "value"), neutral(GENERATE_UNSUPPORTED) + pairs(GENERATE_SUPPORTED))
def test_generate_accepts(service: Service, name: str, value: Any) -> None:
    assert generate(service, {name: value}, {}).status == 200


@pytest.mark.parametrize(("name", "value"), demanding(GENERATE_UNSUPPORTED))
def test_generate_refuses_by_name(service: Service, name: str, value: Any) -> None:
    answer = generate(service, {name: value}, {})
    assert answer.status == 400
    assert (answer.json["error"]["param"], answer.json["error"]["code"]) == (name, "unsupported_field")
    assert name in answer.json["error"]["message"]


@pytest.mark.parametrize(("name", "value"), neutral(SAMPLING_UNSUPPORTED) + pairs(SAMPLING_SUPPORTED))
def test_sampling_params_accept(service: Service, name: str, value: Any) -> None:
    assert generate(service, {}, {name: value}).status == 200


@pytest.mark.parametrize(("name", "value"), demanding(SAMPLING_UNSUPPORTED))
def test_sampling_params_refuse_by_name(service: Service, name: str, value: Any) -> None:
    answer = generate(service, {}, {name: value})
    assert answer.status == 400
    assert answer.json["error"]["param"] == f"sampling_params.{name}"
    assert answer.json["error"]["code"] == "unsupported_field"


@pytest.mark.parametrize(("name", "value"), pairs(OUT_OF_RANGE))
def test_sampling_params_out_of_range(service: Service, name: str, value: Any) -> None:
    answer = generate(service, {}, {name: value})
    assert answer.status == 400
    assert answer.json["error"]["param"].startswith(f"sampling_params.{name}")


@pytest.mark.parametrize("value", [101, -101, 1.5, "high", True])
def test_priorities_out_of_range(service: Service, value: Any) -> None:
    recommended = service.post("/v1/recommend", {"input_ids": IDS, "priority": value})
    for answer in (recommended, generate(service, {"priority": value}, {}), chat(service, {"priority": value})):
        assert (answer.status, answer.json["error"]["param"]) == (400, "priority")


def test_unknown_fields_are_named(service: Service) -> None:
    top = generate(service, {"beamwidth": 4}, {})
    assert (top.status, top.json["error"]["code"], top.json["error"]["param"]) == (400, "unknown_field", "beamwidth")
    inner = generate(service, {}, {"early_stopping": True})
    assert (inner.status, inner.json["error"]["param"]) == (400, "sampling_params.early_stopping")


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
    "stop": ([None, []], "\n"),
    "store": ([None, False], True),
    "tool_choice": ([None, "none", "auto"], "required"),
    "tools": ([None, []], [{"type": "function", "function": {"name": "f"}}]),
    "top_logprobs": ([None, 0], 3),
    "verbosity": ([None, "medium"], "high"),
    "web_search_options": ([None, {}], {"search_context_size": "low"}),
    # extensions of other servers
    "early_stopping": ([None, False], True),
    "allowed_token_ids": ([None, []], [1]),
    "add_generation_prompt": ([None, True], False),
    "min_tokens": ([None, 0], 2),
    "best_of": ([None, 2], 3),
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
    "catalog": [None, "items"],
    "normalizer": [None, "legal"],
    "policy": [None, {"name": "fixed"}],
    "timeout_ms": [None, 20_000],
    "priority": [None, 0, 100, -100],
}


def chat(service: Service, fields: dict[str, Any]) -> Any:
    messages = [{"role": "user", "content": "a"}]
    return service.post("/v1/chat/completions", {"messages": messages, "n": 2, "use_beam_search": True, **fields})


def test_the_chat_tables_cover_the_sdk() -> None:
    known = {**CHAT_UNSUPPORTED, **CHAT_SUPPORTED}
    assert set(CompletionCreateParamsStreaming.__annotations__) - {"messages"} <= set(known)


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
