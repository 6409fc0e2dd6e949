"""From text, messages or a history of items to prompt tokens, off the event loop. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.template import HistoryPrompt
from widebeam.errors import EngineDead, InvalidRequest
from widebeam.model.tokenizer import Tokenizer

T = TypeVar("T")


class Prompts:
    """A tokenizer with a thread of its own: a long prompt must not hold up the event loop."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="widebeam-tokenise")

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def make(
        self,
        catalog: Catalog | None,
        max_tokens: int,
        history: Seq[int | str] | None,
        prompt: str | None,
        messages: list[dict[str, Any]] | None,
        input_ids: Seq[int] | None,
    ) -> HistoryPrompt:
        """The prompt, which is given in one of four forms. A history, which needs a catalog, is cut to `max_tokens`.
        Raises InvalidRequest."""
        given = {"history": history, "prompt": prompt, "messages": messages, "input_ids": input_ids}
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise InvalidRequest(
                f"exactly one of {', '.join(given)} is needed, but {len(named)} were given",
                param=named[1] if named else "history",
            )
        if history is not None:
            if isinstance(history, str) or not isinstance(history, Iterable):  # a text would be read letter by letter
                raise InvalidRequest(f"history: expected a list of ids, got {type(history).__name__}", param="history")
            assert catalog is not None
            return await self.render_history(catalog, history, max_tokens)
        if prompt is not None:
            token_ids = await self.encode(prompt)
        elif messages is not None:
            token_ids = await self.render_chat(messages)
        else:
            token_ids = list(input_ids or ())
        return HistoryPrompt(token_ids=token_ids, num_used=0, num_dropped=0, unknown=[])

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return await self.use(lambda tokenizer: tokenizer.encode(text))

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a chat by the checkpoint's template."""
        return await self.use(lambda tokenizer: tokenizer.render_chat(messages, **options))

    async def render_history(self, catalog: Catalog, history: Seq[int | str], max_tokens: int) -> HistoryPrompt:
        """Token ids of a history by the catalog's template, newest items kept."""
        template = catalog.template
        if template is None:
            raise InvalidRequest(
                f"catalog {catalog.name!r} has no history template: load it with a header that has one, beside the "
                "file or inside a parquet file, which alone can be uploaded with one; or send a prompt",
                code="no_template",
                param="history",
            )
        return await self._off_loop(lambda: template.render(catalog, history, self._required().encode, max_tokens))

    async def use(self, function: Callable[[Tokenizer], T]) -> T:
        """What a function makes with the tokenizer, off the event loop. Raises InvalidRequest without a tokenizer."""
        return await self._off_loop(lambda: function(self._required()))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; empty without a tokenizer."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) if self.tokenizer else ""

    def _required(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "the model has no tokenizer: it takes and returns token ids alone",
                code="no_tokenizer",
                param="input_ids",
            )
        return self.tokenizer

    async def _off_loop(self, function: Callable[[], T]) -> T:
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, function)
        except RuntimeError:  # `close` came first
            raise EngineDead("the engine has stopped") from None
        return await running
