"""What the text dialects share: their fields become search parameters, and sequences become text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from widebeam.engine.request import SearchParams
from widebeam.http.protocol import SearchOptions, Usage
from widebeam.http.sampling import SamplingFields, beam_plan, check_sampling

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchResult, Sequence


def search_params(
    engine: Engine,
    options: SearchOptions,
    fields: SamplingFields,
    *,
    seed: int | None,
    max_new_tokens: int | None,
    request_id: str,
    where: str = "",
) -> tuple[SearchParams, bool, list[str]]:
    """(parameters, whether the answer has the form of a beam search, warnings). Raises InvalidRequest."""
    plan = beam_plan(fields, options.policy, engine.catalogs.get(options.catalog) is not None, where)
    warnings = check_sampling(fields, seed, plan.beams, where)
    params = SearchParams(
        n=plan.n,
        beam_width=plan.width,
        max_new_tokens=max_new_tokens,
        policy=options.policy,
        catalog=options.catalog,
        normalizer=options.normalizer,
        length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        timeout_ms=options.timeout_ms,
        priority=options.priority or 0,
        request_id=request_id,
    )
    return params, plan.beams, warnings


def room(engine: Engine, num_prompt_tokens: int) -> int:
    """Tokens that can be generated behind the prompt until the context or the limit of levels ends."""
    return max(1, min(engine.config.max_levels, engine.max_context_len - num_prompt_tokens))


async def texts(engine: Engine, sequences: Iterable[Sequence], fields: SamplingFields) -> list[str]:
    """The text of each sequence, without its stop token unless `no_stop_trim`; empty without a tokenizer."""
    trim = not fields.no_stop_trim
    ids = [s.token_ids[:-1] if trim and s.finish_reason == "stop" else s.token_ids for s in sequences]
    return await decode_all(engine, ids, skip_special_tokens=fields.skip_special_tokens is not False)


async def decode_all(engine: Engine, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
    """Thousands of beams take long enough to decode that the event loop must not wait for them."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        return [""] * len(ids)
    return await asyncio.to_thread(lambda: [tokenizer.decode(i, skip_special_tokens=skip_special_tokens) for i in ids])


def usage(result: SearchResult) -> Usage:
    total = result.prompt_tokens + result.completion_tokens
    return Usage(prompt_tokens=result.prompt_tokens, completion_tokens=result.completion_tokens, total_tokens=total)
