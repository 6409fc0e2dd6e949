"""A new version of a catalog on all replicas of a Ray Serve application: on every one, or on none. Imports no Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from widebeam.constraints.header import base_name
from widebeam.constraints.object_store import file_name
from widebeam.errors import CatalogError


def publish_catalog(
    handle: Any, path: str | Path, name: str | None = None, *, version: int | None = None, timeout_s: float = 600.0
) -> int:
    """Have every replica load a catalog file, and once all of them have, offer it; returns its version.

    `handle`: of the application, from `serve.get_app_handle`. `path`: where each node has the file, or its URI.
    `version`: its number, if the header does not declare it. Searches go on meanwhile. First all replicas read and
    check the file and put it on the device; if one cannot, all of them drop it, and nothing has changed. Then all offer
    it. When this returns, no replica answers from an older version: now clients can be told of it.

    `timeout_s` bounds each of the two steps. Raises CatalogError, whose message says whether anything has changed; if
    it has, on some replicas, publish again under a higher number. One publisher at a time.
    """
    name = base_name(Path(file_name(str(path)))) if name is None else name
    staged = _on_all(handle, timeout_s, "stage_catalog", str(path), name, version)
    failed = _failed(staged)
    if failed or len(set(staged)) != 1:
        _on_all(handle, timeout_s, "discard_catalog", name)
        raise _error(f"catalog {name!r} is not published, and nothing has changed", staged)
    (number,) = set(staged)
    committed = _on_all(handle, timeout_s, "commit_catalog", name, number)
    if _failed(committed):
        raise _error(f"catalog {name!r} is at version {number} on some replicas only", committed)
    return int(number)


def _on_all(handle: Any, timeout_s: float, method: str, *arguments: Any) -> list[Any]:
    """What a method returns on each replica, or the error that it raises there."""
    results: list[Any] = handle.broadcast(method, *arguments).results(timeout_s=timeout_s, return_exceptions=True)
    return results


def _failed(results: list[Any]) -> list[BaseException]:
    return [one for one in results if isinstance(one, BaseException)]


def _error(what: str, results: list[Any]) -> CatalogError:
    failed = _failed(results)
    if not results:
        return CatalogError(f"{what}: there is no replica")
    if not failed:
        return CatalogError(f"{what}: replicas read different versions, {sorted(set(results))}")
    reasons = list(dict.fromkeys(str(getattr(error, "cause", error)) for error in failed))
    return CatalogError(f"{what}: {len(failed)} of {len(results)} replicas: {reasons[0]}", reasons)
