"""How far a long step of a start is: a bar on a terminal; elsewhere, where nobody could read one, lines of the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Iterator
from typing import TypeVar

from tqdm import tqdm

EVERY_S = 10.0
"""Between two lines."""
log = logging.getLogger(__name__)
T = TypeVar("T")


def progress(items: Collection[T], doing: str, unit: str) -> Iterator[T]:
    """The items; `doing` says what is done with each of them, which is one `unit`."""
    if sys.stderr.isatty():
        yield from tqdm(items, desc=doing, unit=unit, file=sys.stderr)
        return
    started = said = time.monotonic()
    for done, item in enumerate(items):
        if (now := time.monotonic()) - said >= EVERY_S:
            log.info("%s: %d of %d, %.0f s", doing, done, len(items), now - started)
            said = now
        yield item
