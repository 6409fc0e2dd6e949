"""Names to implementations, imported only when asked for."""

from __future__ import annotations

import difflib
import importlib
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to `"module:attribute"`, so that a heavy backend is imported only when somebody names it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._targets: dict[str, str | T] = {}

    def add(self, name: str, target: str | T) -> None:
        """Register an object, or the `"module:attribute"` where it will be found. A name is taken once."""
        if name in self._targets:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._targets[name] = target

    def names(self) -> list[str]:
        return sorted(self._targets)

    def get(self, name: str) -> T:
        """The object of that name. Raises KeyError with the nearest names in its message."""
        if name not in self._targets:
            near = difflib.get_close_matches(name, self._targets, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise KeyError(f"unknown {self.kind} {name!r}: known are {', '.join(self.names())}{hint}")
        target = self._targets[name]
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            target = getattr(importlib.import_module(module), attribute)
            self._targets[name] = target
        return target
