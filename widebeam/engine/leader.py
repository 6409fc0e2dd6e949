"""The leader's side of several ranks: everything that followers must do is told before the leader does it itself.

Whatever goes wrong after that leaves ranks that are out of step, so that it ends the engine.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from widebeam.constraints.catalog import Catalog
from widebeam.engine.core import Core
from widebeam.engine.messages import Answer, Nodes, Reserve, Stop, launch_message
from widebeam.engine.ranks import Ranks
from widebeam.engine.search import Between
from widebeam.engine.shapes import Size
from widebeam.engine.wave import Wave
from widebeam.errors import EngineDead


class Leader:
    """Tells followers. On the GPU thread, but for `upload`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._next_number = itertools.count()
        self._numbers: weakref.WeakKeyDictionary[Catalog, int] = weakref.WeakKeyDictionary()
        """Of the catalog versions that somebody holds, as followers know them."""
        self._uploaded: set[int] = set()
        self._graphed: set[Size] | None = None
        """As followers know them."""

    @contextmanager
    def launching(self, core: Core, wave: Wave) -> Iterator[None]:
        """Followers run the wave too. Raises EngineDead for any error within."""
        graphed = core.programs.graphed
        changed = None if graphed == self._graphed else sorted(graphed)
        number = None if wave.catalog is None else self._numbers[wave.catalog]
        at_once = bool(torch._inductor.config.triton.skip_cudagraph_warmup) if graphed else False
        message = launch_message(wave, number, changed, at_once)
        with self._in_step():
            self._ranks.commands.send(message)
            self._graphed = set(graphed)
            yield

    def telling(self, between: Between) -> Between:
        """The same decisions between pieces, which followers hear."""

        def told(decide: Callable[[], bool]) -> bool:
            yes = decide()
            self._ranks.commands.send(Answer(yes))
            return yes

        def run_others() -> None:
            between.run_others()
            self._ranks.commands.send(Answer(False))  # that was the last of them

        return Between(lambda: told(between.wanted), lambda: told(between.others_wait), run_others, between.grown)

    def reserve(self, core: Core, catalog: Catalog) -> None:
        """Followers give the version the range that it has here."""
        if catalog in self._numbers:
            return
        living = sorted(self._numbers.values())
        number = self._numbers[catalog] = next(self._next_number)
        lease = core.catalogs.lease(catalog)
        message = Reserve(number, catalog.name, (lease.base, lease.count), living)
        with self._in_step():
            self._ranks.commands.send(message, [tokens.astype("<i8") for tokens in catalog.level_token_ids])

    def upload(self, catalog: Catalog) -> None:
        """Followers fill it, beside their waves. Returns when all have. On any thread."""
        number = self._numbers[catalog]
        if number in self._uploaded:
            return
        with self._in_step():
            self._ranks.bulk.send(Nodes(number, catalog.index.mixed_depth), catalog.index.arrays)
            self._ranks.bulk.meet()
        self._uploaded.add(number)

    def stop(self) -> None:
        """Followers end."""
        self._ranks.commands.send(Stop())
        self._ranks.leave()

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise EngineDead("the ranks of the model are out of step") from error
