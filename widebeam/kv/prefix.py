"""What of a prompt later prompts with the same beginning can use again: its pages, and their keys. Imports no torch.

Keys are made at admission, on any thread; `prefix_cache.py` looks them up.

Letters: T tokens of a prompt, S page size in tokens.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

KEY_BYTES = 16
_SECRET = secrets.token_bytes(32)
"""Of this process, so that nobody outside can compute keys. Model and dtype of the pages are constant in a process, and
therefore no part of a key."""


def prefix_keys(token_ids: np.ndarray, page_size: int, salt: bytes) -> tuple[bytes, ...]:
    """A key for each page of a prompt that can be shared: for the first (T - 1) // S, since the last token is always
    computed, and its page is written then.

    `token_ids`: int32 [T]. Key i depends on the salt and on tokens 0 .. (i + 1) S - 1: it is the BLAKE2b of these (RFC
    7693), under a key made of the salt and a secret.
    """
    running = hashlib.blake2b(key=hashlib.blake2b(salt, key=_SECRET).digest(), digest_size=KEY_BYTES)
    data = np.asarray(token_ids, dtype=np.int32).tobytes()
    page_bytes = page_size * np.dtype(np.int32).itemsize
    keys: list[bytes] = []
    for page in range((len(token_ids) - 1) // page_size):
        running.update(data[page * page_bytes : (page + 1) * page_bytes])
        keys.append(running.copy().digest())
    return tuple(keys)


@dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """What of a prompt can be shared, and with whom."""

    token_ids: np.ndarray
    """The whole prompt, int32 [T]."""
    salt: bytes
    keys: tuple[bytes, ...]
    """See `prefix_keys`. Fewer: only so many pages are looked up and shared."""

    @classmethod
    def of(cls, token_ids: np.ndarray, page_size: int, salt: bytes = b"") -> Prefix:
        return cls(token_ids, salt, prefix_keys(token_ids, page_size, salt))

    def first(self, count: int) -> Prefix:
        """At most so many of its pages."""
        return replace(self, keys=self.keys[:count])

    def page(self, index: int, page_size: int) -> bytes:
        """The token ids of a page, as int32."""
        return np.asarray(self.token_ids[index * page_size : (index + 1) * page_size], dtype=np.int32).tobytes()


class Waits(Protocol):
    """A search that waits for its turn."""

    prefix: Prefix | None
    prefetched: bool
    """Whether its pages were looked for."""

    @property
    def num_tokens(self) -> int: ...
