"""What an engine can run at all, and whether a search is within that. Imports no torch."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from widebeam.config import EngineConfig
from widebeam.engine.budgets import budget_limits, demand, flag
from widebeam.engine.scheduler import Load, WaveLimits
from widebeam.engine.wave import Search
from widebeam.errors import InvalidRequest
from widebeam.faults import counted

if TYPE_CHECKING:
    from widebeam.model.config import ModelConfig
    from widebeam.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)
_OVER_BUDGET = {
    "rows": ("beam_too_wide", "beam_width"),
    "row_levels": ("search_too_large", "max_new_tokens"),
    "tokens": ("context_too_long", "input_ids"),
}
"""Code and field of a search that is over a budget by itself."""


@dataclass(frozen=True)
class Limits:
    """What this engine can run at all."""

    config: EngineConfig
    vocab_size: int
    max_context_len: int
    eos_token_ids: frozenset[int]
    special_token_ids: tuple[int, ...]
    """The tokenizer's; empty without one."""
    wave: WaveLimits

    @staticmethod
    def of(
        config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None, max_context_len: int, wave: WaveLimits
    ) -> Limits:
        """Those of a model. Tokens that its head does not have are left out."""
        size = model.vocab_size
        eos = {*model.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}
        reachable = frozenset(token for token in eos if 0 <= token < size)
        special = tuple(token for token in tokenizer.special_token_ids if token < size) if tokenizer else ()
        return Limits(config, size, max_context_len, reachable, special, wave)

    @functools.cached_property
    def budgets(self) -> dict[str, int]:
        """What may wait and run together."""
        return budget_limits(self.config, self.wave, self.max_context_len)

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt that the context pool and the budget can hold; the context length may be less."""
        return min(self.wave.context_pages * self.wave.page_size, self.budgets["tokens"])

    def warn(self) -> None:
        """Log what keeps prompts from being as long as the context length says."""
        if self.longest_prompt < self.max_context_len - 1:
            log.warning(
                "prompts of over %d tokens are refused, and histories cut to that, although the context length is %d: "
                "raise --max-total-tokens or --max-waiting-tokens, or lower --max-context-len",
                self.longest_prompt, self.max_context_len,
            )  # fmt: skip

    def check(self, search: Search) -> None:
        """Refuse what could never run, or never be accepted, however idle the engine is; name the flag that would let
        it. Raises InvalidRequest."""
        self._check_memory(search)
        self._check_budgets(search)

    def _check_memory(self, search: Search) -> None:
        alone, wave = Load.of([search], self.wave), self.wave
        if alone.pages > wave.context_pages:
            raise InvalidRequest(
                f"the prompt needs {alone.pages} KV pages, but the pool has {wave.context_pages} (--max-total-tokens)",
                code="context_too_long",
                param="input_ids",
            )
        if alone.slots > wave.beam_slots:
            raise InvalidRequest(
                f"{counted(search.levels, 'level')} of {counted(search.beam_rows, 'row')} need {alone.slots} beam KV "
                f"tokens, but the pool has {wave.beam_slots} (--beam-kv-tokens)",
                code="search_too_large",
                param="max_new_tokens",
            )

    def _check_budgets(self, search: Search) -> None:
        needed = demand(search)
        for budget, (code, param) in _OVER_BUDGET.items():
            if needed[budget] > self.budgets[budget]:
                raise InvalidRequest(
                    f"the search needs {needed[budget]} {budget}, over the limit of {self.budgets[budget]} "
                    f"({flag(budget)})",
                    code=code,
                    param=param,
                )
