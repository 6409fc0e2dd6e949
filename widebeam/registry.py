"""Names to implementations, imported only when asked for; other distributions may add some by entry points."""

from __future__ import annotations

import difflib
import importlib
import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, NamedTuple, TypeVar

from widebeam.errors import ConfigError, EngineError

T = TypeVar("T")
log = logging.getLogger("widebeam.registry")


class _Plugin(NamedTuple):
    """What another distribution offers."""

    entry: EntryPoint
    loaded: Any
    problem: str | None
    """Why it cannot be used."""

    @property
    def source(self) -> str:
        name = self.entry.dist.name if self.entry.dist is not None else "an unknown distribution"
        return f"{name} ({self.entry.value})"


class Registry(Generic[T]):
    """Maps a name to `"module:attribute"`, so that a heavy backend is imported only when somebody names it.

    `group`: entry points of this group are found by `discover`.
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self.kind, self.group = kind, group
        self._targets: dict[str, str | T] = {}
        self._plugins: dict[str, _Plugin] = {}

    def add(self, name: str, target: str | T) -> None:
        """Register an object, or the `"module:attribute"` where it will be found. A name is taken once."""
        if name in self._targets:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._targets[name] = target

    def discover(self) -> None:
        """Import what installed distributions offer by entry points, and offer that alone from then on.

        Raises ConfigError if two things have one name, since requests would not know which they get. What cannot be
        imported is logged, and fails those who name it.
        """
        found: dict[str, _Plugin] = {}
        for entry in entry_points(group=self.group) if self.group else ():
            here = _Plugin(entry, None, None)
            if entry.name in self._targets:
                raise ConfigError(f"{self.kind} {entry.name!r} of {here.source} has the name of a built-in one")
            if entry.name in found:
                other = found[entry.name].source
                raise ConfigError(f"{self.kind} {entry.name!r} is offered by both {other} and {here.source}")
            try:
                found[entry.name] = here._replace(loaded=entry.load())
            except Exception as error:
                problem = f"{self.kind} {entry.name!r} of {here.source} cannot be imported"
                log.warning("%s: %s", problem, error, exc_info=True)
                found[entry.name] = here._replace(problem=f"{problem}: {type(error).__name__}")
        self._plugins = found

    def names(self) -> list[str]:
        return sorted([*self._targets, *self._plugins])

    def get(self, name: str) -> T:
        """The object of that name. Raises KeyError with the nearest names in its message, or EngineError if it belongs
        to another distribution and cannot be imported."""
        plugin = self._plugins.get(name)
        if plugin is not None:
            if plugin.problem is not None:
                raise EngineError(plugin.problem, code="broken_plugin")
            loaded: T = plugin.loaded
            return loaded
        if name not in self._targets:
            near = difflib.get_close_matches(name, self.names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise KeyError(f"unknown {self.kind} {name!r}: known are {', '.join(self.names())}{hint}")
        target = self._targets[name]
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            target = getattr(importlib.import_module(module), attribute)
            self._targets[name] = target
        return target
