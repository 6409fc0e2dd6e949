"""Every field that SGLang's clients can send: fine at its default, refused by name where it asks for more.

The tables are written from the dialects' own descriptions, not from the code under test.
"""

from __future__ import annotations

from typing import Any

import pytest

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
    "token_ids_logprob": ([None, []], [1]),
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
    "top_logprobs_num": [None, 0],
    "return_text_in_logprobs": [None, False, True],
    "return_beam_details": [None, False, True],
    "return_prompt_token_ids": [False, True],
    "priority": [None, 0, 100, -100],
    "extra_key": [None, "tenant"],
    "cache_salt": [None, "salt"],
    # labels: they ask nothing of the answer
    "routing_key": [None, "user-1"],
    "conversation_id": [None, "c"],
    "custom_labels": [None, {"team": "a"}],
    "external_trace_header": [None, {"traceparent": "00"}],
    "received_time": [None, 1.5],
}
SAMPLING_UNSUPPORTED: dict[str, tuple[list[Any], Any]] = {
    "min_new_tokens": ([0, None], 2),  # with beams
    "stop": ([None, "", []], ["\n"]),  # with beams
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
    "suppress_special_tokens": [None, False, True],
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
    "min_new_tokens": [-1, 513],
    "stop": [["x"] * 33, [""], ["x" * 1025], "x" * 1025, 7],
    "logit_bias": [{"64": 1}, {"-1": 1}, {"x": 1}, {"7": "x"}, {"7": 1e40}, dict.fromkeys(map(str, range(4097)), 0)],
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


def test_likely_tokens_are_bounded(service: Service) -> None:
    for value in (129, -1, 1.5):
        answer = generate(service, {"return_logprob": True, "top_logprobs_num": value}, {})
        assert (answer.status, answer.json["error"]["param"]) == (400, "top_logprobs_num")
    assert generate(service, {"return_logprob": True, "top_logprobs_num": 128}, {}).status == 200


def test_unknown_fields_are_named(service: Service) -> None:
    top = generate(service, {"beamwidth": 4}, {})
    assert (top.status, top.json["error"]["code"], top.json["error"]["param"]) == (400, "unknown_field", "beamwidth")
    inner = generate(service, {}, {"early_stopping": True})
    assert (inner.status, inner.json["error"]["param"]) == (400, "sampling_params.early_stopping")
