"""From a user's history to items: what an engine does around the search, and ahead of it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filter_spec import Filters
from widebeam.engine.admission import admit, opened_prompt
from widebeam.engine.request import NO_CATALOG, SearchParams
from widebeam.engine.results import Prefilled, Recommendation, ranked_items
from widebeam.errors import InvalidRequest

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine


class Recommending:
    """Prompts by the catalog's template, and items of the sequences found."""

    async def recommend(
        self,
        *,
        history: Seq[int | str] | None = None,
        prompt: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        input_ids: Seq[int] | None = None,
        n: int = 10,
        fields: Seq[str] = (),
        unknown_items: Literal["ignore", "refuse"] = "ignore",
        exclude_history: bool = False,
        params: SearchParams | None = None,
    ) -> Recommendation:
        """Ranked items for a history of item ids, or for a prompt in one of three forms. Raises RequestError.

        `n` counts items; `params.n` is replaced by it. Without a width in `params` the beam is default_beam_width wide.
        With `exclude_history` no item of the history comes back.
        """
        engine = cast("Engine", self)
        engine._check_ready()
        params = params or SearchParams()
        catalog = _current(engine, params.catalog, params.min_catalog_version)
        catalog.check_fields(fields)
        if unknown_items not in ("ignore", "refuse"):
            raise InvalidRequest(f"unknown_items is {unknown_items!r}: ignore or refuse", param="unknown_items")
        if params.beam_width is None and (params.policy is None or params.policy.widths is None):
            params = msgspec.structs.replace(params, beam_width=_default_width(engine, n))
        if exclude_history and history is None:
            raise InvalidRequest("exclude_history needs a history", param="exclude_history")
        made = await engine._prompts.make(catalog, _room(engine, catalog), history, prompt, messages, input_ids)
        if made.unknown and unknown_items == "refuse":
            raise InvalidRequest(f"unknown items in history: {made.unknown[:5]}", code="unknown_item", param="history")
        if exclude_history and history is not None:
            params = _denying(params, set(history).difference(made.unknown))
        result = await engine.submit(made.token_ids, msgspec.structs.replace(params, n=n), catalog=catalog)
        items = ranked_items(catalog, result.sequences, n, fields, result.mask)
        result.warnings += made.warnings
        return Recommendation(items=items, result=result, unknown_items=made.unknown, num_history=made.num_used)

    async def prefill(
        self,
        *,
        history: Seq[int | str] | None = None,
        prompt: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        input_ids: Seq[int] | None = None,
        catalog: str | None = None,
        min_catalog_version: int | None = None,
        cache_salt: str | None = None,
        ttl_s: float | None = None,
        timeout_ms: int | None = None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> Prefilled:
        """Compute the prompt that `recommend` makes of the same, for the prefix cache. Raises RequestError.

        Without a catalog, or with "none", it is the prompt as it is given, which a history cannot be. `ttl_s`: seconds
        within which that is likely to be asked for. The others are as in SearchParams.
        """
        engine = cast("Engine", self)
        engine._check_ready()
        if engine.config.prefix_cache == "off":
            raise InvalidRequest(
                "there is no prefix cache to fill: start with --prefix-cache on", code="no_prefix_cache"
            )
        chosen = engine.catalogs.get if history is None else functools.partial(_current, engine)
        offered = chosen(catalog, min_catalog_version)
        made = await engine._prompts.make(offered, _room(engine, offered), history, prompt, messages, input_ids)
        token_ids = opened_prompt(made.token_ids, offered, engine._limits)
        params = SearchParams(  # one token, which nobody sees, is the least that follows a prompt
            max_new_tokens=1, catalog=NO_CATALOG, ignore_eos=True, cache_salt=cache_salt, ttl_s=ttl_s,
            timeout_ms=timeout_ms, priority=priority, request_id=request_id,
        )  # fmt: skip
        result = msgspec.structs.replace(await engine.submit(token_ids, params), sequences=[])
        result.warnings += made.warnings
        page = engine.config.page_size
        return Prefilled(result=result, cacheable_tokens=(result.prompt_tokens - 1) // page * page)


def refused_default(engine: Engine, catalog: Catalog) -> str:
    """Why a recommendation that names no width is refused, whatever its prompt; empty if it is not."""
    params = SearchParams(n=1, beam_width=_default_width(engine, 1))
    try:
        admit([0], params, catalog, engine._limits)
    except InvalidRequest as error:
        return error.message
    return ""


def _default_width(engine: Engine, n: int) -> int:
    return min(max(engine.config.default_beam_width, n), engine.config.max_beam_width)


def _current(engine: Engine, name: str | None, min_version: int | None) -> Catalog:
    """The version that is recommended from."""
    if (catalog := engine.catalogs.get(name, min_version)) is None:
        known = ", ".join(engine.catalogs.names())
        there = f", name one of {known}" * bool(known)
        ways = f"start with --catalog FILE{there}, or search without one (/generate)"
        raise InvalidRequest(
            f"there is no catalog to recommend from: {ways}",
            code="no_catalog",
            param="catalog",
        )
    return catalog


def _room(engine: Engine, catalog: Catalog | None) -> int:
    """Tokens that a history may have: what the pool holds, and the context beside what is searched behind it."""
    if catalog is None:
        return 0
    most = min(engine.max_context_len - catalog.depth, engine._limits.longest_prompt)
    return most - (catalog.markers.begin is not None)


def _denying(params: SearchParams, ids: Iterable[int | str]) -> SearchParams:
    """The same search without these items."""
    filters = params.filters or Filters()
    return msgspec.structs.replace(params, filters=msgspec.structs.replace(filters, deny=(*(filters.deny or ()), *ids)))
