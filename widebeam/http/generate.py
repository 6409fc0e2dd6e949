"""POST /generate: SGLang's form, for text, batches and beams."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from aiohttp import web
from msgspec import UNSET

from widebeam.errors import InvalidRequest, RequestError
from widebeam.http.auth import tenant_salt
from widebeam.http.batches import Prompt, of_prompt, run_all, split_prompts, told_as
from widebeam.http.body import decode, json_response, read_body, refuse_unsupported
from widebeam.http.keys import adopt_id, limit_time, working_engine
from widebeam.http.sequences import Plan, Spelling, Text, plan_search, run_plan
from widebeam.http.sglang import (
    GENERATE_NEUTRAL,
    SAMPLING_NEUTRAL,
    BeamMeta,
    BeamResult,
    GenerateRequest,
    GenerateResponse,
    LogprobTriple,
    RequestMeta,
    SamplingParams,
)
from widebeam.http.streaming import EventStream

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchResult

T = TypeVar("T")
D = TypeVar("D")
_DECODER = msgspec.json.Decoder(GenerateRequest)


class Job(msgspec.Struct, kw_only=True):
    """One prompt of the body, checked and ready to run."""

    prompt: Prompt
    names: dict[str, str]
    """What the fields of SearchParams are called here."""
    plan: Plan
    logprobs: bool
    text_in_logprobs: bool
    prompt_ids_wanted: bool
    started: float
    first: int
    """Place of its first answer in the list of all."""

    @property
    def samples(self) -> bool:
        """Several independent texts: an answer for each."""
        return self.plan.params.n > 1 and not self.plan.beams


async def generate(request: web.Request) -> web.StreamResponse:
    """One dict for one prompt, a list for a list of prompts or several samples of one; as events with `stream`.

    Events of texts come as they grow, each with all of one so far. A beam is ranked only when its search is over.
    """
    started = time.perf_counter()
    engine = working_engine(request)
    body = decode(_DECODER, await read_body(request))
    refuse_unsupported(body, GENERATE_NEUTRAL)
    limit_time(request, body.timeout_ms)
    jobs, batched = _jobs(engine, body, request, started)
    listed = batched or jobs[0].samples
    events = EventStream(request) if body.stream else None

    def grown(first: int, answers: list[GenerateResponse]) -> None:
        for index, answer in enumerate(answers, first):
            if events is not None and answer.meta_info.finish_reason is None and not events.lags:
                answer.index = index if listed else UNSET
                events.send(answer)

    by_prompt = await run_all([_run(request, engine, job, grown if body.stream else None) for job in jobs], batched)
    answers = [answer for of_one in by_prompt for answer in of_one]
    if events is None:
        return json_response(answers if listed else answers[0])
    for index, answer in enumerate(answers):
        answer.index = index if listed else UNSET
        events.send(answer)
    return events.end()


def _jobs(engine: Engine, body: GenerateRequest, request: web.Request, started: float) -> tuple[list[Job], bool]:
    prompts, batched = _prompts(body)
    count = len(prompts)
    sampling = _each(body.sampling_params, count, batched, SamplingParams(), "sampling_params")
    logprobs = _each(body.return_logprob, count, batched, False, "return_logprob")
    top_logprobs = _each(body.top_logprobs_num, count, batched, 0, "top_logprobs_num")
    cache_salts = _each(body.cache_salt, count, batched, None, "cache_salt")
    extra_keys = _each(body.extra_key, count, batched, None, "extra_key")
    first_id = adopt_id(request, body.rid if isinstance(body.rid, str) else None)
    made_up = [f"{first_id}_{index}" for index in range(count)] if batched else [first_id]
    ids = body.rid if isinstance(body.rid, list) else made_up
    if len(ids) != count or (isinstance(body.rid, list) and not batched):
        raise InvalidRequest(f"rid is a list of {len(ids)}, where prompts are {_listed(count, batched)}", param="rid")
    jobs: list[Job] = []
    for index, (prompt, fields) in enumerate(zip(prompts, sampling, strict=True)):
        try:
            if top_logprobs[index] and not logprobs[index]:
                raise InvalidRequest("top_logprobs_num needs return_logprob", param="top_logprobs_num")
            salt = tenant_salt(request, cache_salts[index], extra_keys[index])
            names = _names(body, fields)
            with told_as(names):
                plan = _plan(engine, body, fields, top_logprobs[index], ids[index], salt)
        except RequestError as error:
            raise of_prompt(index, error) if count > 1 else error from None
        job = Job(
            prompt=prompt,
            names=names,
            plan=plan,
            logprobs=logprobs[index],
            text_in_logprobs=bool(body.return_text_in_logprobs),
            prompt_ids_wanted=bool(body.return_prompt_token_ids),
            started=started,
            first=sum(job.plan.params.n if job.samples else 1 for job in jobs),
        )
        jobs.append(job)
    return jobs, batched


def _prompts(body: GenerateRequest) -> tuple[list[Prompt], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give exactly one of text and input_ids", param="input_ids")
    if body.text is not None:
        return split_prompts(body.text, "text")
    return split_prompts(body.input_ids or [], "input_ids")


def _each(given: T | list[T] | None, count: int, batched: bool, default: D, name: str) -> list[T | D]:
    """The value for each prompt, from one for all or a list."""
    if not isinstance(given, list):
        one: T | D = default if given is None else given
        return [one] * count
    if not batched or len(given) != count:
        raise InvalidRequest(
            f"{name} is a list of {len(given)}, where prompts are {_listed(count, batched)}", param=name
        )
    return [*given]


def _listed(count: int, batched: bool) -> str:
    return f"a list of {count}" if batched else "one, not a list"


def _plan(
    engine: Engine, body: GenerateRequest, fields: SamplingParams, top_logprobs: int, rid: str, cache_salt: str | None
) -> Plan:
    refuse_unsupported(fields, SAMPLING_NEUTRAL, "sampling_params.")
    if body.beam_width is not None:
        if fields.beam_width not in (None, body.beam_width) or fields.n not in (None, body.beam_width):
            raise InvalidRequest(
                "beam_width contradicts sampling_params; put it into sampling_params", param="beam_width"
            )
        if fields.beam_width is None:
            fields = msgspec.structs.replace(fields, beam_width=body.beam_width, n=body.beam_width)
    plan = plan_search(
        engine,
        body,
        fields,
        max_new_tokens=fields.max_new_tokens if isinstance(fields.max_new_tokens, int) else None,
        top_logprobs=top_logprobs,
        beam_details=bool(body.return_beam_details),
        request_id=rid,
        cache_salt=cache_salt,
        where="sampling_params.",
    )
    plan.fill_context = fields.max_new_tokens is None
    return plan


def _names(body: GenerateRequest, fields: SamplingParams) -> dict[str, str]:
    inside = ["n", "beam_width", "max_new_tokens", "min_new_tokens", "stop_token_ids", "suppress_special_tokens"]
    names = {name: f"sampling_params.{name}" for name in inside}
    if body.beam_width is not None and fields.beam_width is None:
        names["beam_width"] = "beam_width"
    elif fields.beam_width is None:
        names["beam_width"] = names["n"]
    return names | {"input_ids": "input_ids" if body.text is None else "text", "top_logprobs": "top_logprobs_num"}


async def _run(
    request: web.Request, engine: Engine, job: Job, grown: Callable[[int, list[GenerateResponse]], None] | None
) -> list[GenerateResponse]:
    with told_as(job.names):
        prompt_ids = await engine.encode(job.prompt) if isinstance(job.prompt, str) else job.prompt
        catalog = job.plan.catalog
        if job.prompt_ids_wanted and prompt_ids and catalog is not None:  # what is shown is what was searched
            prompt_ids = catalog.markers.opened(np.array(prompt_ids)).tolist()
        _, answers = await run_plan(
            request,
            engine,
            prompt_ids,
            job.plan,
            lambda *found: _answers(job, prompt_ids, *found),
            None if grown is None else lambda _, so_far: grown(job.first, so_far),
        )
    return answers


NOTHING = {"type": "length", "length": 0}
"""How an answer ends to which filters left nothing."""


def _answers(
    job: Job, prompt_ids: list[int], result: SearchResult, texts: list[Text], spelling: Spelling
) -> list[GenerateResponse]:
    """One for all beams, or one for each sample."""
    results = [
        BeamResult(text=text.text, output_ids=text.sequence.token_ids, meta_info=_beam_meta(text, job, spelling))
        for text in texts
    ]
    if not job.samples:
        return [_answer(job, prompt_ids, result, results, result.completion_tokens)]
    return [_answer(job, prompt_ids, result, [one], len(one.output_ids)) for one in results]


def _answer(
    job: Job, prompt_ids: list[int], result: SearchResult, beams: list[BeamResult], completion_tokens: int
) -> GenerateResponse:
    best = beams[0] if beams else BeamResult(text="", output_ids=[], meta_info=BeamMeta(finish_reason=NOTHING))
    meta = RequestMeta(
        **msgspec.structs.asdict(best.meta_info),
        id=result.request_id,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        completion_tokens=completion_tokens,
        normalizer=result.normalizer,
        input_token_logprobs=[] if job.logprobs else UNSET,
        input_top_logprobs=[] if job.plan.params.top_logprobs else UNSET,
        e2e_latency=time.perf_counter() - job.started,
        response_sent_to_client_ts=time.time(),
    )
    first = BeamResult(text=best.text, output_ids=best.output_ids, meta_info=meta)
    if job.plan.beams:
        meta = msgspec.structs.replace(meta, beam_results=[first, *beams[1:]] if beams else [])
    if result.levels is not None:
        meta = msgspec.structs.replace(meta, beam_details=result.levels)
    return GenerateResponse(
        text=best.text,
        output_ids=best.output_ids,
        meta_info=meta,
        prompt_token_ids=prompt_ids if job.prompt_ids_wanted else UNSET,
        warnings=result.warnings or UNSET,
    )


def _beam_meta(text: Text, job: Job, spelling: Spelling) -> BeamMeta:
    sequence = text.sequence
    meta = BeamMeta(finish_reason=_finish_reason(text, job.plan.params.max_new_tokens))
    if job.plan.beams:
        meta.sequence_score = sequence.score
    if text.items is not None:
        meta.items = text.items
    if not job.logprobs:
        return meta

    def triple(token: int, logprob: float) -> LogprobTriple:
        return logprob, token, spelling.token(token) if job.text_in_logprobs else None

    meta.output_token_logprobs = list(map(triple, sequence.token_ids, sequence.logprobs))
    meta.output_token_logprobs_length = len(sequence.logprobs)
    if sequence.top_logprobs is not None:
        meta.output_top_logprobs = [[triple(*entry) for entry in entries] for entries in sequence.top_logprobs]
    return meta


def _finish_reason(text: Text, max_new_tokens: int | None) -> dict[str, Any] | None:
    """A whole item counts as `length` where its depth was the only limit or equals the given one."""
    if text.sequence.finish_reason is None:
        return None
    if text.matched is not None:
        return {"type": "stop", "matched": text.matched}
    sequence, length = text.sequence, len(text.sequence.token_ids)
    if sequence.finish_reason == "item" and max_new_tokens not in (None, length):
        return {"type": "stop", "matched": sequence.token_ids[-1]}
    return {"type": "length", "length": length}
