"""What the text dialects share: their fields become a search, and what it finds becomes text."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from widebeam.engine.request import NO_CATALOG, SearchParams
from widebeam.engine.results import rows_of
from widebeam.errors import InvalidRequest
from widebeam.http.keys import FACTS, METRICS
from widebeam.http.protocol import PromptDetails, SearchOptions, Usage
from widebeam.http.sampling import SamplingFields, beam_plan, text_sampling, token_bias, without_effect
from widebeam.http.stop_strings import UNFINISHED, Stop, find_stop, settled, text_ends

if TYPE_CHECKING:
    from widebeam.constraints.catalog import Catalog
    from widebeam.constraints.filters import ItemMask
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import FinishReason, SearchResult, Sequence
    from widebeam.model.tokenizer import Tokenizer

T = TypeVar("T")


class Plan(msgspec.Struct, kw_only=True):
    """A body that was checked, but for its prompt."""

    params: SearchParams
    catalog: Catalog | None
    """The version to search, however long the prompt takes to be made."""
    fields: SamplingFields
    beams: bool
    """The answer has the form of a beam search."""
    fill_context: bool = False
    """Without a catalog, as many tokens as the context has room for."""
    warnings: list[str]

    @property
    def settles_early(self) -> bool:
        """What is asked for is known of each token once it is there. Of beams it is not."""
        asks_later = bool(self.params.top_logprobs) or self.params.return_beam_details
        return not (self.beams or self.catalog is not None or asks_later)


class Text(msgspec.Struct):
    """A sequence as the client sees it; of one that grows, what is settled."""

    sequence: Sequence
    text: str
    matched: int | str | None
    """The stop token or string that ended it."""
    items: list[int | str] | None
    """Ids of the items that it spells; None without a catalog."""


def plan_search(
    engine: Engine,
    options: SearchOptions,
    fields: SamplingFields,
    *,
    max_new_tokens: int | None,
    top_logprobs: int,
    beam_details: bool,
    request_id: str,
    cache_salt: str | None,
    where: str = "",
) -> Plan:
    """What the fields ask for; `where` is the path to those of sampling. `cache_salt`: see `auth.tenant_salt`. Raises
    InvalidRequest, NotFound or CatalogVersionNotReady."""
    catalog = engine.catalogs.get(options.catalog, options.min_catalog_version)
    plan = beam_plan(fields, options.policy, catalog is not None, where)
    vocab_size = engine.model_config.vocab_size
    sampling, warnings = None, []
    if plan.beams or catalog is not None:
        token_bias(fields, vocab_size, where)
        warnings = without_effect(fields, where, plan.by_greed)
    else:
        sampling = text_sampling(fields, vocab_size, where)
    if fields.stop_strings and engine.tokenizer is None:
        raise InvalidRequest(
            f"{where}stop: the model has no tokenizer; use stop_token_ids", code="no_tokenizer", param=where + "stop"
        )
    params = SearchParams(
        n=plan.n,
        beam_width=plan.width,
        max_new_tokens=max_new_tokens,
        policy=options.policy,
        catalog=NO_CATALOG if catalog is None else catalog.name,
        filters=options.filters,
        normalizer=options.normalizer,
        length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        sampling=sampling,
        suppress_special_tokens=bool(fields.suppress_special_tokens),
        top_logprobs=top_logprobs,
        return_beam_details=beam_details,
        timeout_ms=options.timeout_ms,
        cache_salt=cache_salt,
        priority=options.priority or 0,
        request_id=request_id,
    )
    return Plan(params=params, catalog=catalog, fields=fields, beams=plan.beams, warnings=warnings)


async def run_plan(
    request: web.Request,
    engine: Engine,
    prompt_ids: list[int],
    plan: Plan,
    form: Callable[[SearchResult, list[Text], Spelling], T],
    grown: Callable[[SearchResult, T], None] | None = None,
) -> tuple[SearchResult, T]:
    """Search, cut texts at stop strings, and give them the form of the dialect.

    Thousands of beams take long enough to spell that the event loop must not wait for them: `form` runs on a thread.
    `grown` takes what is settled of texts while they grow, if what is asked of them is known before they end.
    """
    params, catalog = plan.params, plan.catalog
    if plan.fill_context and catalog is None:
        room = min(engine.config.max_levels, engine.max_context_len - len(prompt_ids))
        params = msgspec.structs.replace(params, max_new_tokens=max(1, room))

    def spell(result: SearchResult) -> tuple[SearchResult, T]:
        spelling = Spelling(engine.tokenizer, plan.fields, None if catalog is None else catalog.markers.end)
        texts = [_text(sequence, spelling, params, catalog, result.mask) for sequence in result.sequences]
        shown = msgspec.structs.replace(
            result, sequences=[text.sequence for text in texts], warnings=plan.warnings + result.warnings
        )
        return shown, form(shown, texts, spelling)

    async def follow(so_far: SearchResult) -> bool:
        shown, formed = await asyncio.to_thread(spell, so_far)
        if all(sequence.finish_reason is not None for sequence in shown.sequences):  # each at a stop string, or before
            return True
        if grown is not None:
            grown(shown, formed)
        return False

    follows = plan.settles_early and (grown is not None or bool(plan.fields.stop_strings))
    result = await engine.submit(prompt_ids, params, catalog=catalog, follow=follow if follows else None)
    shown, formed = await asyncio.to_thread(spell, result)
    request.app[METRICS].observe_search(shown)
    request[FACTS].add(shown)
    return shown, formed


class Spelling:
    """Token ids to text, as one request wants it. Empty texts without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, fields: SamplingFields, end: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._end = end
        """Token that is shown behind an item."""
        self._skip = fields.skip_special_tokens is not False
        self._stop_strings = fields.stop_strings
        self._keeps_stop = fields.keeps_stop
        self._tokens: dict[int, str] = {}

    def decode(self, ids: list[int]) -> str:
        """Text of several tokens."""
        return "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def token(self, token: int) -> str:
        """One token by itself, special ones included."""
        if self._tokenizer is None:
            return ""
        if token not in self._tokens:
            self._tokens[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._tokens[token]

    def shown(self, sequence: Sequence) -> list[int]:
        """The tokens that the text is made of: not a stop token, unless it is to be kept; with an end marker."""
        if sequence.finish_reason == "item" and self._end is not None:
            return [*sequence.token_ids, self._end]
        trims = sequence.finish_reason == "stop" and not self._keeps_stop
        return sequence.token_ids[:-1] if trims else sequence.token_ids

    def spell(self, sequence: Sequence) -> tuple[str, Stop | None]:
        """The text, and the stop string that it was cut at."""
        ids = self.shown(sequence)
        text = self.decode(ids)
        certain = text.rstrip(UNFINISHED) if sequence.finish_reason is None else text
        stop = find_stop(self.decode, ids, certain, self._stop_strings)
        if stop is None:
            return text, None
        return text[: stop.end if self._keeps_stop else stop.start], stop

    def settled(self, ids: list[int], text: str) -> tuple[int, str]:
        """How many tokens of a growing text stay as they are spelt, and their text."""
        stays = settled(text, self._stop_strings)
        if len(stays) == len(text):
            return len(ids), text
        return bisect_right(text_ends(self.decode, ids), len(stays)), stays


def _text(
    sequence: Sequence, spelling: Spelling, params: SearchParams, catalog: Catalog | None, mask: ItemMask | None
) -> Text:
    text, stop = spelling.spell(sequence)
    items = None if catalog is None else [catalog.item_id(row) for row in rows_of(catalog, sequence, mask)]
    if stop is not None:
        return Text(_cut(sequence, stop.num_tokens, params.length_penalty, "stop"), text, stop.string, items)
    if sequence.finish_reason is None:
        length, text = spelling.settled(sequence.token_ids, text)
        return Text(_cut(sequence, length, params.length_penalty, None), text, None, items)
    matched = sequence.token_ids[-1] if sequence.finish_reason == "stop" else None
    return Text(sequence, text, matched, items)


def _cut(sequence: Sequence, length: int, length_penalty: float, finish_reason: FinishReason | None) -> Sequence:
    """The sequence as if it had ended, or had come, there."""
    logprobs = sequence.logprobs[:length]
    top = sequence.top_logprobs
    return msgspec.structs.replace(
        sequence,
        token_ids=sequence.token_ids[:length],
        logprobs=logprobs,
        top_logprobs=None if top is None else top[:length],
        cum_logprob=sum(logprobs),
        score=sum(logprobs) / max(1, length) ** length_penalty,
        finish_reason=finish_reason,
    )


def usage(*results: SearchResult) -> Usage:
    """Sums over searches: each prompt once, and all sequences."""
    prompt = sum(result.prompt_tokens for result in results)
    completion = sum(result.completion_tokens for result in results)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(result.cached_tokens for result in results)),
    )
