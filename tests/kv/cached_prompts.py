"""Prompts over few tokens, in pages of two, that visit a pool with a prefix cache."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from tests.model.test_attention import CONFIG
from widebeam.kv.context import ContextKV
from widebeam.kv.prefix import Prefix
from widebeam.kv.prefix_cache import PrefixCache

CPU = torch.device("cpu")
S = 2
Beginning = tuple[bytes, tuple[int, ...]]
"""A salt and the tokens up to the end of a page: all that keys and values of the page depend on."""


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def pool_with(cache: PrefixCache, num_pages: int = 6) -> ContextKV:
    return ContextKV(CONFIG, num_pages, cache.page_size, torch.float32, CPU, cache)


def visit(pool: ContextKV, prompt: np.ndarray, salt: bytes = b"", keep_until: float | None = None) -> int:
    """Search once and keep the pages. Returns the tokens that were cached."""
    lease = pool.acquire(len(prompt), Prefix.of(prompt, pool.page_size, salt))
    assert lease is not None
    pool.release(lease, keep=True, keep_until=keep_until)
    pool.check_integrity()
    return lease.num_cached


def cached_tokens(pool: ContextKV, prompt: np.ndarray, salt: bytes = b"") -> int:
    assert pool.cache is not None
    prefix = Prefix.of(prompt, pool.page_size, salt)
    found = len(pool.cache.match(prefix)) * pool.page_size
    assert pool.cache.peek(prefix) == found
    return found


def pages_of(salt: bytes, ids: tuple[int, ...]) -> list[Beginning]:
    return [(salt, ids[: (i + 1) * S]) for i in range(-(-len(ids) // S))]


def shareable(salt: bytes, ids: tuple[int, ...]) -> list[Beginning]:
    """All pages but the one with the last token."""
    return pages_of(salt, ids)[:-1]


PROMPT = st.tuples(
    st.sampled_from([b"a", b"a", b"b"]),
    st.builds(lambda pages, end: tuple(np.repeat(pages, S)) + end, st.lists(st.integers(0, 2), max_size=3).map(tuple),
              st.sampled_from([(3,), (3, 3)])),
)  # fmt: skip
"""A salt and a few tokens: pages of one of three kinds, and an end."""
