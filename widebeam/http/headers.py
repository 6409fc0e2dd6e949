"""The headers of our own that requests and responses have."""

from __future__ import annotations

from aiohttp import web

from widebeam.http.keys import FACTS, REQUEST_ID, server_state

ID_HEADER = "x-request-id"
TIMEOUT_HEADER = "x-request-timeout-ms"
VERSION_HEADER = "x-catalog-version"
"""Of the catalog that was searched: not every dialect has a place for it in its body."""


def complete_head(response: web.StreamResponse, request: web.Request, failed: bool = False) -> None:
    """What every response says, whatever it answers."""
    response.headers[ID_HEADER] = request[REQUEST_ID]
    if not failed and (version := request[FACTS].version) is not None:
        response.headers[VERSION_HEADER] = str(version)
    if server_state(request.app) != "ready":  # a client that reconnects finds a server that stays
        response.force_close()
