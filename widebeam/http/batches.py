"""Bodies with several prompts: taking them apart, running all of them, and saying which one an error is about, or which
field of the body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from widebeam.errors import InvalidRequest, RequestError

T = TypeVar("T")
Prompt = str | list[int]
MAX_BATCH = 1024


def split_prompts(given: str | list[Any], param: str) -> tuple[list[Prompt], bool]:
    """(prompts, whether they came as a list) of a text, token ids, or a list of texts or of lists of token ids."""
    if isinstance(given, str):
        return [given], False
    kinds = {type(entry) for entry in given}
    if not kinds:
        raise InvalidRequest(f"{param} is empty", code="empty_prompt", param=param)
    if len(kinds) > 1:
        raise InvalidRequest(f"{param} mixes texts, token ids and lists of token ids", param=param)
    if kinds == {int}:
        return [given], False
    if len(given) > MAX_BATCH:
        raise InvalidRequest(f"{param} has {len(given)} prompts, over the limit of {MAX_BATCH}", param=param)
    return list(given), True


async def run_all(runs: list[Coroutine[Any, Any, T]], batched: bool) -> list[T]:
    """All answers in order. The first failure cancels the others and names its place in the batch."""
    if not batched or len(runs) == 1:
        return [await runs[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_indexed(index, run)) for index, run in enumerate(runs)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _indexed(index: int, run: Coroutine[Any, Any, T]) -> T:
    try:
        return await run
    except RequestError as error:
        raise of_prompt(index, error) from None


def of_prompt(index: int, error: RequestError) -> RequestError:
    """The error with the place of its prompt."""
    return _restated(error, f"prompt {index} of the batch: {error.message}", error.param)


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """What the engine finds wrong with a field of SearchParams, or with `input_ids`, names what the body has in its
    place: `names` by the engine's names."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        name = names.get(param, param)
        if name == param:
            raise
        raise _restated(error, re.sub(rf"\b{re.escape(param)}\b", name, error.message), name) from None


def _restated(error: RequestError, message: str, param: str | None) -> RequestError:
    """The same error in other words."""
    return type(error)(message, code=error.code, param=param, retry_after_s=error.retry_after_s)
