"""What is to become of a catalog, and what became of such changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.difference import Difference, difference

Build = Callable[[Catalog | None], Catalog | None]
"""Makes a catalog from the version that is current, or None where there is to be none. Runs on a thread."""


@dataclass
class ChangeStats:
    """What became of changes, by catalog."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By catalog and outcome: `ok`, `staged`, `invalid_catalog` for a file, or the code of an error class."""
    build_s: dict[str, float] = field(default_factory=dict)
    """Seconds in which the version was built that was offered last."""
    swap_s: dict[str, float] = field(default_factory=dict)
    """Seconds from then until new searches got it."""


@dataclass(frozen=True)
class Change:
    """What is to become of a catalog."""

    name: str
    build: Build
    if_version: int | None = None
    """Only if the catalog is at this version; 0: only if there is none."""
    needs_one: bool = False
    """Only if there is such a catalog when its turn comes."""
    numbered: bool = False
    """What `build` makes has its number."""
    count: Callable[[Catalog | None, Catalog | None], Difference] = difference
    """Of the versions before and after, for the log. Runs on a thread."""
    offered: Callable[[], None] = lambda: None
    """Called at once when new searches get it."""
    built_s: float = 0.0
    """Seconds that went into it before its turn."""
    keep: Callable[[Catalog], None] | None = None
    """Gets what is on the device now, in the place of new searches."""
