"""Stands in for torchvision, which SGLang's client imports and, for text, never calls.

The one on PyPI is made for a CUDA build of torch and does not import beside a CPU build.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from typing import Any

__version__ = "0.28.0"
__path__: list[str] = []


class Placeholder:
    """Any attribute of an absent module, at any depth."""

    def __getattr__(self, name: str) -> Placeholder:
        return self


class Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()


class Finder(MetaPathFinder, Loader):
    """Makes every submodule of torchvision an absent one."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(Finder())
