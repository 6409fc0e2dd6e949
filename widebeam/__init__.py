"""WideBeam: a serving engine for semantic-ID generative recommendation.

Public names are resolved when first used, so that the HTTP client needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from widebeam.client import AsyncClient, Client
    from widebeam.config import EngineConfig
    from widebeam.constraints.catalog import Catalog
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchParams
    from widebeam.history import anchored_history
    from widebeam.sessions import session_key

__version__ = "0.1.0"
_HOMES = {
    "AsyncClient": "widebeam.client",
    "Catalog": "widebeam.constraints.catalog",
    "Client": "widebeam.client",
    "Engine": "widebeam.engine.engine",
    "EngineConfig": "widebeam.config",
    "SearchParams": "widebeam.engine.request",
    "anchored_history": "widebeam.history",
    "session_key": "widebeam.sessions",
}
__all__ = [
    "AsyncClient",
    "Catalog",
    "Client",
    "Engine",
    "EngineConfig",
    "SearchParams",
    "__version__",
    "anchored_history",
    "session_key",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'widebeam' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
