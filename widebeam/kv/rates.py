"""Whether bringing pages back from the host's memory is faster than computing them, and what was brought. Imports no
torch."""

from __future__ import annotations

from typing import NamedTuple

FORGET = 0.95
"""What a wave's weight in the prefill rate becomes with each wave that follows."""


class HostStats(NamedTuple):
    """Of the host tier. Pages and bytes since the start, but for the first three; rates are 0 until they are known."""

    pages: int = 0
    """Now in the host's memory."""
    page_bytes: int = 0
    size_bytes: int = 0
    """Of all pages that there is room for."""
    saved: int = 0
    dropped: int = 0
    """Not saved: too many waited to be, or the host's pages were all in use."""
    restored: int = 0
    declined: int = 0
    """Not restored: computing them was faster."""
    evicted: int = 0
    """From the host's memory, for others."""
    corrupt: int = 0
    """Found not to be what was saved, with those that continue them."""
    failed: int = 0
    """Whose copy, either way, could not be launched."""
    waits: int = 0
    """Waves that waited on the host for pages in flight."""
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    seconds_to_host: float = 0.0
    """Time that copies took."""
    seconds_to_device: float = 0.0
    restore_bytes_per_s: float = 0.0
    """As measured at start."""
    prefill_tokens_per_s: float = 0.0
    """As measured lately."""


class PrefillRate:
    """How fast prompts are computed.

    Least squares through the origin, over the last waves: tokens are weighed by the size of their wave, as small waves
    say little but what any wave costs.
    """

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """A wave has computed so many tokens."""
        self._seconds = FORGET * self._seconds + num_tokens * seconds
        self._tokens = FORGET * self._tokens + num_tokens * num_tokens

    @property
    def tokens_per_s(self) -> float:
        """0 while nothing is known."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


def restore_pays(num_tokens: int, num_bytes: int, bytes_per_s: float, tokens_per_s: float) -> bool:
    """Whether so many bytes arrive sooner than the tokens in them are computed; yes while a rate is unknown, 0."""
    return not (bytes_per_s and tokens_per_s) or num_bytes / bytes_per_s < num_tokens / tokens_per_s
