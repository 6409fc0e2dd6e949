"""Stop strings: a text ends where it spells one. The engine knows tokens alone, so this looks at what it gave."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

Decode = Callable[[list[int]], str]
UNFINISHED = "\ufffd"
"""What a tokenizer shows for bytes that are not, or not yet, a character."""


class Stop(NamedTuple):
    """Where a text ends."""

    num_tokens: int
    """Tokens up to the one that completed the string."""
    start: int
    end: int
    """Places of the string in the text."""
    string: str


def find_stop(decode: Decode, ids: list[int], text: str, strings: Sequence[str]) -> Stop | None:
    """The end of `text`, which `decode` makes of `ids`: at the first token that completes one of the strings.

    If it completes several, the one that begins first counts, then the one that is named first.
    """
    completed = [text.index(string) + len(string) for string in strings if string in text]
    if not completed:
        return None
    ends = text_ends(decode, ids)
    last = min(bisect_left(ends, min(completed)), len(ids) - 1)
    seen = text[: max(ends[last], min(completed))]
    start, _, string = min((seen.index(string), i, string) for i, string in enumerate(strings) if string in seen)
    return Stop(last + 1, start, start + len(string), string)


def settled(text: str, strings: Sequence[str]) -> str:
    """What of a growing text stays whatever comes: all but unfinished characters and what may begin a stop string."""
    text = text.rstrip(UNFINISHED)
    begun = (n for string in strings for n in range(1, len(string)) if text.endswith(string[:n]))
    return text[: len(text) - max(begun, default=0)]


def text_ends(decode: Decode, ids: list[int]) -> list[int]:
    """For each token, the length of the text that is certain with it: a character counts when all its bytes are there.

    Each step decodes a short window, with a token or more in front whose text is known: tokenizers separate or trim
    words by what stands before them.
    """
    ends: list[int] = []
    start, known = 0, 0  # the window's first token; tokens whose text is known
    behind, before = 0, 0  # length of the known text, and of its part in the window
    for count in range(1, len(ids) + 1):
        window = decode(ids[start:count])
        certain = len(window.rstrip(UNFINISHED))
        ends.append(behind + max(0, (len(window) if count == len(ids) else certain) - before))
        if certain == len(window) > before:
            start, known, behind = known, count, ends[-1]
            before = len(decode(ids[start:known]))
    return ends
