"""POST /tokenize and POST /detokenize, beside transformers' own tokenizer, and what other routes count."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

import widebeam
from tests.http.service import Service, code, running_service

TEXT = "<|im_start|> user watched <a_3> nobody <b_5> <|im_end|>"
CHAT = [{"role": "user", "content": "watched <a_9>"}, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
PLAIN = [CHAT[0], {"role": "assistant", "content": "a"}]


@pytest.fixture(scope="module")
def judge(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(checkpoint))


def tokens(service: Service, **body: Any) -> dict[str, Any]:
    answer = service.post("/tokenize", body)
    assert answer.status == 200, answer.content
    found: dict[str, Any] = answer.json
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == service.engine.max_context_len
    return found


def test_a_text_becomes_what_transformers_makes_of_it_and_comes_back(service: Service, judge: Any) -> None:
    found = tokens(service, model="any", prompt=TEXT)
    assert set(found) == {"count", "max_model_len", "tokens"}
    assert found["tokens"] == judge.encode(TEXT, add_special_tokens=False)
    assert tokens(service, prompt=TEXT, return_token_strs=True)["token_strs"] == judge.tokenize(TEXT)
    back = service.post("/detokenize", {"model": "any", "tokens": found["tokens"]})
    assert back.json == {"prompt": judge.decode(found["tokens"])} == {"prompt": TEXT.replace("nobody", "[UNK]")}
    assert (
        tokens(service, prompt="")["tokens"] == [] and service.post("/detokenize", {"tokens": []}).json["prompt"] == ""
    )


def test_a_chat_becomes_what_its_template_makes_of_it(service: Service, judge: Any) -> None:
    for begun in (None, True, False):
        found = tokens(service, messages=CHAT, add_generation_prompt=begun, return_token_strs=True)
        text = judge.apply_chat_template(PLAIN, tokenize=False, add_generation_prompt=begun is not False)
        assert found["tokens"] == judge.encode(text, add_special_tokens=False)
        assert found["token_strs"] == judge.tokenize(text)


def test_other_routes_count_the_same(service: Service) -> None:
    for path, prompt in (("/v1/chat/completions", {"messages": CHAT}), ("/v1/completions", {"prompt": TEXT})):
        usage = service.post(path, {**prompt, "n": 2}).json["usage"]
        assert usage["prompt_tokens"] == tokens(service, **prompt)["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": [CHAT[0] | {"tool_calls": [1]}]}, "messages[0].tool_calls"),
        ("/tokenize", {"text": "a"}, "text"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [7, 1000]}, "tokens"),
        ("/detokenize", {"tokens": [7, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": "7"}, "tokens"),
        ("/detokenize", {"tokens": [0] * (2**20 + 1)}, "tokens"),
    ],
)
def test_what_is_wrong_is_named_in_openais_form(service: Service, path: str, body: Any, param: str) -> None:
    answer = service.post(path, body)
    assert answer.status == 400, answer.content
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}
    assert answer.json["error"]["param"] == param


@pytest.fixture(scope="module")
def bracketed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A model whose tokenizer puts a token before a text, as Qwen's do not."""
    folder = tmp_path_factory.mktemp("bracketed") / "model"
    shutil.copytree(checkpoint, folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    begin = ("<|endoftext|>", 0)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [begin])
    tokenizer.save_pretrained(folder)
    with running_service(folder, None) as service:
        yield service


def test_what_the_tokenizer_adds_is_added_if_asked_for(bracketed: Service) -> None:
    for prompt in ({"prompt": "watched a"}, {"messages": CHAT}):
        plain = tokens(bracketed, **prompt)["tokens"]
        assert tokens(bracketed, **prompt, add_special_tokens=True)["tokens"] == [0, *plain]
        assert tokens(bracketed, **prompt, add_special_tokens=False)["tokens"] == plain
        assert plain[0] != 0


def test_without_a_tokenizer_it_says_so(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / name, tmp_path)
    with running_service(tmp_path, None) as service:
        for path, body, param in (
            ("/tokenize", {"prompt": "a"}, "prompt"),
            ("/tokenize", {"messages": CHAT}, "messages"),
            ("/detokenize", {"tokens": [7]}, "tokens"),
        ):
            answer = service.post(path, body)
            assert code(answer) == (400, "no_tokenizer") and answer.json["error"]["param"] == param


def test_version_and_ping(service: Service) -> None:
    assert service.get("/version").json == {"version": widebeam.__version__}
    for method in ("GET", "POST"):
        assert (service.call(method, "/ping").status, service.call(method, "/ping").json) == (200, {"status": "ready"})
