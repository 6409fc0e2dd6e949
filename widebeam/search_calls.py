"""What the SDK calls to search: for items, texts and beams, in each dialect; ahead of a search, and to end one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from widebeam.constraints.filter_spec import Filters
from widebeam.engine.request import Normalizer
from widebeam.errors import InvalidRequest
from widebeam.http.openai import ChatResponse, CompletionResponse
from widebeam.http.protocol import MAX_TIMEOUT_MS, PrefillResponse, RecommendResponse
from widebeam.http.sglang import GenerateResponse
from widebeam.policies import PolicySpec
from widebeam.sessions import session_headers
from widebeam.transport import Transport, encode


class SearchCalls:
    """A part of `AsyncClient`."""

    _transport: Transport
    _timeout_s: float

    async def recommend(
        self,
        *,
        history: Sequence[int | str] | None = None,
        prompt: str | None = None,
        messages: Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | None = None,
        n: int = 10,
        beam_width: int | None = None,
        policy: PolicySpec | dict[str, Any] | None = None,
        catalog: str | None = None,
        min_catalog_version: int | None = None,
        normalizer: Normalizer | None = None,
        length_penalty: float | None = None,
        fields: Sequence[str] = (),
        unknown_items: Literal["ignore", "refuse"] = "ignore",
        filters: Filters | dict[str, Any] | None = None,
        exclude_history: bool = False,
        cache_salt: str | None = None,
        priority: int | None = None,
        request_id: str | None = None,
        session_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (a whole call with its retries, not one await)
    ) -> RecommendResponse:
        """The n best items after a history of item ids (oldest first), or after a prompt in one of its other forms.

        `filters` says which items may come back; `fields` names metadata columns to return; `timeout` (seconds)
        replaces the client's for this call. With `min_catalog_version` a server whose catalog is older does not
        answer: the call is repeated, and in the end raises `CatalogVersionNotReady`.
        """
        body = {
            "history": history,
            "prompt": prompt,
            "messages": messages,
            "input_ids": input_ids,
            "n": n,
            "beam_width": beam_width,
            "policy": policy,
            "catalog": catalog,
            "min_catalog_version": min_catalog_version,
            "normalizer": normalizer,
            "length_penalty": length_penalty,
            "fields": fields,
            "unknown_items": unknown_items,
            "filters": filters,
            "exclude_history": exclude_history,
            "cache_salt": cache_salt,
            "priority": priority,
            "request_id": request_id,
        }
        return await self._search("/v1/recommend", RecommendResponse, body, timeout, session_id)

    async def prefill(
        self,
        *,
        history: Sequence[int | str] | None = None,
        prompt: str | None = None,
        messages: Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | None = None,
        catalog: str | None = None,
        min_catalog_version: int | None = None,
        cache_salt: str | None = None,
        ttl_s: float | None = None,
        priority: int | None = None,
        request_id: str | None = None,
        session_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (a whole call with its retries, not one await)
    ) -> PrefillResponse:
        """Have the prompt of a `recommend` computed before it is sent: with the same history, catalog and salt.

        Or that of a `generate` or `chat` that names the same catalog or "none", in any form but `history`. `ttl_s` says
        in how many seconds it will be sent at the latest. Needs a server with a prefix cache.
        """
        body = {
            "history": history,
            "prompt": prompt,
            "messages": messages,
            "input_ids": input_ids,
            "catalog": catalog,
            "min_catalog_version": min_catalog_version,
            "cache_salt": cache_salt,
            "ttl_s": ttl_s,
            "priority": priority,
            "request_id": request_id,
        }
        return await self._search("/v1/prefill", PrefillResponse, body, timeout, session_id)

    async def generate(
        self,
        text: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        session_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (a whole call with its retries, not one await)
        **fields: Any,
    ) -> GenerateResponse | list[GenerateResponse]:
        """SGLang's /generate: one answer, or a list of them for a list of prompts or several texts of one.

        `msgspec.to_builtins` makes SGLang's dict of an answer. `fields` are further top-level keys of the body, such as
        `return_logprob` or `catalog`.
        """
        body = {"text": text, "input_ids": input_ids, "sampling_params": sampling_params, **fields}
        kind = GenerateResponse | list[GenerateResponse]
        return await self._search("/generate", kind, body, timeout, session_id)

    async def chat(
        self,
        messages: Sequence[dict[str, Any]] | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        n: int | None = None,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        policy: PolicySpec | dict[str, Any] | None = None,
        catalog: str | None = None,
        min_catalog_version: int | None = None,
        normalizer: Normalizer | None = None,
        length_penalty: float | None = None,
        priority: int | None = None,
        request_id: str | None = None,
        session_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (a whole call with its retries, not one await)
        **fields: Any,
    ) -> ChatResponse:
        """OpenAI's chat completion: its choices are beams, best first, or texts, with `text`, `score` and `logprobs`.

        `fields` are further top-level keys of the body, such as `stop_token_ids` or `ignore_eos`.
        """
        body = {
            "messages": messages,
            "input_ids": input_ids,
            "n": n,
            "beam_width": beam_width,
            "max_completion_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "seed": seed,
            "stop": stop,
            "logprobs": logprobs,
            "top_logprobs": top_logprobs,
            "policy": policy,
            "catalog": catalog,
            "min_catalog_version": min_catalog_version,
            "normalizer": normalizer,
            "length_penalty": length_penalty,
            "priority": priority,
            "rid": request_id,
            **fields,
        }
        return await self._search("/v1/chat/completions", ChatResponse, body, timeout, session_id)

    async def completions(
        self,
        prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        n: int | None = None,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        logprobs: int | None = None,
        request_id: str | None = None,
        session_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (a whole call with its retries, not one await)
        **fields: Any,
    ) -> CompletionResponse:
        """OpenAI's completion of a prompt, or of each of several: `n` choices a prompt, in the order of the prompts.

        `fields` are further top-level keys of the body, such as `temperature` or `catalog`.
        """
        body = {
            "prompt": prompt,
            "n": n,
            "beam_width": beam_width,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "rid": request_id,
            **fields,
        }
        return await self._search("/v1/completions", CompletionResponse, body, timeout, session_id)

    async def abort(self, rid: str, *, session_id: str | None = None) -> int:
        """End the searches of a request id; their callers get an `Aborted` error. Returns how many were ended.

        Of several servers the one is asked to which `session_id` leads: give that of the request.
        """
        body, headers = encode({"rid": rid}), session_headers(session_id)
        answer = await self._transport.call(
            "POST", "/abort_request", dict[str, int], lambda _: body, self._timeout_s, headers=headers
        )
        return int(answer["aborted"])

    async def _search(
        self, path: str, kind: Any, body: dict[str, Any], timeout_s: float | None, session_id: str | None
    ) -> Any:
        """A call whose server is told, at each try, what remains of the timeout."""
        if body.get("stream"):
            raise InvalidRequest("this client takes whole answers", code="unsupported_field", param="stream")
        longest_ms = body.get("timeout_ms") or MAX_TIMEOUT_MS

        def timed(remaining_s: float) -> bytes:
            return encode(body | {"timeout_ms": min(longest_ms, max(1, int(remaining_s * 1000)))})

        within_s = self._timeout_s if timeout_s is None else timeout_s
        headers = session_headers(session_id)
        return await self._transport.call("POST", path, kind, timed, within_s, headers=headers)
