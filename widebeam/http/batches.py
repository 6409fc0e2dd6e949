"""Bodies with several prompts: taking them apart, and running all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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
    if not batched:
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
    return restated(error, f"prompt {index} of the batch: {error.message}", error.param)


def restated(error: RequestError, message: str, param: str | None) -> RequestError:
    """The same error in other words."""
    return type(error)(message, code=error.code, param=param, retry_after_s=error.retry_after_s)
