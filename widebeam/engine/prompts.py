"""From text, messages or a history of items to prompt tokens, off the event loop. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.template import HistoryPrompt
from widebeam.errors import InvalidRequest
from widebeam.model.tokenizer import Tokenizer

T = TypeVar("T")


class Prompts:
    """A tokenizer with a thread of its own: a long prompt must not hold up the event loop."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="widebeam-tokenise")

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return await self._off_loop(lambda: self._required().encode(text))

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a chat by the checkpoint's template."""
        return await self._off_loop(lambda: self._required().render_chat(messages, **options))

    async def render_history(self, catalog: Catalog, history: Seq[int | str], max_tokens: int) -> HistoryPrompt:
        """Token ids of a history by the catalog's template, newest items kept."""
        template = catalog.template
        if template is None:
            raise InvalidRequest(
                f"catalog {catalog.name!r} has no history template; add one to its header, or send a prompt",
                code="no_template",
                param="history",
            )
        return await self._off_loop(lambda: template.render(catalog, history, self._required().encode, max_tokens))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; empty without a tokenizer."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) if self.tokenizer else ""

    def _required(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: send input_ids", code="no_tokenizer", param="input_ids")
        return self.tokenizer

    async def _off_loop(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
