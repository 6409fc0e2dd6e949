"""POST /generate: SGLang's form, for text, batches and beams."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from widebeam.engine.request import SearchParams
from widebeam.errors import InvalidRequest, RequestError
from widebeam.http.body import decode, event_stream, json_response, read_body, refuse_unsupported
from widebeam.http.keys import METRICS, adopt_id, working_engine
from widebeam.http.sequences import room, search_params, texts
from widebeam.http.sglang import (
    GENERATE_NEUTRAL,
    SAMPLING_NEUTRAL,
    BeamMeta,
    BeamResult,
    GenerateRequest,
    GenerateResponse,
    RequestMeta,
    SamplingParams,
)

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchResult, Sequence

T = TypeVar("T")
Prompt = str | list[int]
_DECODER = msgspec.json.Decoder(GenerateRequest)


class Job(msgspec.Struct, kw_only=True):
    """One prompt of the body, checked and ready to run."""

    prompt: Prompt
    sampling: SamplingParams
    params: SearchParams
    beams: bool
    logprobs: bool
    prompt_ids_wanted: bool
    warnings: list[str]
    started: float


async def generate(request: web.Request) -> web.Response:
    """One dict for one prompt, a list for a list of prompts; as events with `stream`.

    A beam is ranked only when the search is over, so a stream is one event for each prompt, and an error comes before
    it as a plain response with its status.
    """
    started = time.perf_counter()
    engine = working_engine(request)
    body = decode(_DECODER, await read_body(request))
    refuse_unsupported(body, GENERATE_NEUTRAL)
    jobs, batched = _jobs(engine, body, request, started)
    answers = await _all([_run(request, engine, job) for job in jobs], batched)
    if not body.stream:
        return json_response(answers if batched else answers[0])
    if batched:
        for index, answer in enumerate(answers):
            answer.index = index
    return event_stream(answers)


def _jobs(engine: Engine, body: GenerateRequest, request: web.Request, started: float) -> tuple[list[Job], bool]:
    prompts, batched = _prompts(body)
    count = len(prompts)
    sampling = _each(body.sampling_params, count, batched, SamplingParams(), "sampling_params")
    logprobs = _each(body.return_logprob, count, batched, False, "return_logprob")
    first_id = adopt_id(request, body.rid if isinstance(body.rid, str) else None)
    made_up = [f"{first_id}_{index}" for index in range(count)] if batched else [first_id]
    ids = body.rid if isinstance(body.rid, list) else made_up
    if len(ids) != count or (isinstance(body.rid, list) and not batched):
        raise InvalidRequest(f"rid has {len(ids)} entries for {count} prompts", param="rid")
    jobs = []
    for index, (prompt, fields) in enumerate(zip(prompts, sampling, strict=True)):
        try:
            params, beams, warnings = _params(engine, body, fields, ids[index])
        except RequestError as error:
            raise _at(index, error) if batched else error from None
        job = Job(
            prompt=prompt,
            sampling=fields,
            params=params,
            beams=beams,
            logprobs=logprobs[index],
            prompt_ids_wanted=bool(body.return_prompt_token_ids),
            warnings=warnings,
            started=started,
        )
        jobs.append(job)
    return jobs, batched


def _prompts(body: GenerateRequest) -> tuple[list[Prompt], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give exactly one of text and input_ids", param="input_ids")
    if body.text is not None:
        batched = isinstance(body.text, list)
        prompts: list[Any] = body.text if isinstance(body.text, list) else [body.text]
    else:
        ids = body.input_ids or []
        kinds = {type(entry) for entry in ids}
        if len(kinds) > 1:
            raise InvalidRequest("input_ids mixes token ids and lists of token ids", param="input_ids")
        batched = kinds == {list}
        prompts = list(ids) if batched else [ids]
    if not prompts:
        raise InvalidRequest("the list of prompts is empty", param="text")
    return prompts, batched


def _each(given: T | list[T] | None, count: int, batched: bool, default: T, name: str) -> list[T]:
    """The value for each prompt, from one for all or a list."""
    if not isinstance(given, list):
        return [default if given is None else given] * count
    if not batched or len(given) != count:
        raise InvalidRequest(f"{name} has {len(given)} entries, but there is {count} prompt(s)", param=name)
    return given


def _params(
    engine: Engine, body: GenerateRequest, fields: SamplingParams, rid: str
) -> tuple[SearchParams, bool, list[str]]:
    refuse_unsupported(fields, SAMPLING_NEUTRAL, "sampling_params.")
    if body.beam_width is not None:
        if fields.beam_width not in (None, body.beam_width) or fields.n not in (None, body.beam_width):
            raise InvalidRequest(
                "beam_width contradicts sampling_params; put it into sampling_params", param="beam_width"
            )
        if fields.beam_width is None:
            fields = msgspec.structs.replace(fields, beam_width=body.beam_width, n=body.beam_width)
    return search_params(
        engine,
        body,
        fields,
        seed=fields.sampling_seed,
        max_new_tokens=fields.max_new_tokens if isinstance(fields.max_new_tokens, int) else None,
        request_id=rid,
        where="sampling_params.",
    )


async def _all(runs: list[Any], batched: bool) -> list[GenerateResponse]:
    """All answers in order. The first failure cancels the others and names its place in the batch."""
    if not batched:
        return [await runs[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_indexed(index, run)) for index, run in enumerate(runs)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _indexed(index: int, run: Any) -> GenerateResponse:
    try:
        return await run
    except RequestError as error:
        raise _at(index, error) from None


def _at(index: int, error: RequestError) -> RequestError:
    return type(error)(
        f"prompt {index} of the batch: {error.message}",
        code=error.code,
        param=error.param,
        retry_after_s=error.retry_after_s,
    )


async def _run(request: web.Request, engine: Engine, job: Job) -> GenerateResponse:
    prompt_ids = await engine.encode(job.prompt) if isinstance(job.prompt, str) else job.prompt
    params = job.params
    if job.sampling.max_new_tokens is None and engine.catalogs.get(params.catalog) is None:
        params = msgspec.structs.replace(params, max_new_tokens=room(engine, len(prompt_ids)))
    result = await engine.submit(prompt_ids, params)
    request.app[METRICS].observe_search(result)
    beams = [
        BeamResult(text=text, output_ids=sequence.token_ids, meta_info=_beam_meta(sequence, params, job))
        for sequence, text in zip(result.sequences, await texts(engine, result.sequences, job.sampling), strict=True)
    ]
    return _answer(job, result, beams, prompt_ids)


def _answer(job: Job, result: SearchResult, beams: list[BeamResult], prompt_ids: list[int]) -> GenerateResponse:
    best = beams[0]
    meta = RequestMeta(
        **msgspec.structs.asdict(best.meta_info),
        id=result.request_id,
        prompt_tokens=result.prompt_tokens,
        completion_tokens=result.completion_tokens,
        normalizer=result.normalizer,
        input_token_logprobs=[] if job.logprobs else UNSET,
        e2e_latency=time.perf_counter() - job.started,
        response_sent_to_client_ts=time.time(),
    )
    first = BeamResult(text=best.text, output_ids=best.output_ids, meta_info=meta)
    if job.beams:
        meta = msgspec.structs.replace(meta, beam_results=[first, *beams[1:]])
    warnings = job.warnings + result.warnings
    return GenerateResponse(
        text=best.text,
        output_ids=best.output_ids,
        meta_info=meta,
        prompt_token_ids=prompt_ids if job.prompt_ids_wanted else UNSET,
        warnings=warnings or UNSET,
    )


def _beam_meta(sequence: Sequence, params: SearchParams, job: Job) -> BeamMeta:
    meta = BeamMeta(finish_reason=_finish_reason(sequence, params.max_new_tokens))
    if job.beams:
        meta.sequence_score = sequence.score
    if job.logprobs:
        meta.output_token_logprobs = [
            (logprob, token, None) for logprob, token in zip(sequence.logprobs, sequence.token_ids, strict=True)
        ]
        meta.output_token_logprobs_length = len(sequence.logprobs)
    return meta


def _finish_reason(sequence: Sequence, max_new_tokens: int | None) -> dict[str, Any]:
    """A whole item counts as `length` where its depth was the only limit or equals the given one."""
    length = len(sequence.token_ids)
    whole_item = sequence.finish_reason == "item" and max_new_tokens in (None, length)
    if sequence.finish_reason == "length" or whole_item:
        return {"type": "length", "length": length}
    return {"type": "stop", "matched": sequence.token_ids[-1]}
