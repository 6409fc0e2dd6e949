"""Builds the aiohttp application: routes, middleware, shared state."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiohttp import web

from widebeam.config import ServerConfig
from widebeam.http import admin, catalogs, openapi
from widebeam.http.auth import load_keyring
from widebeam.http.chat import chat_completions
from widebeam.http.completions import completions
from widebeam.http.generate import generate
from widebeam.http.keys import ENGINE, IN_FLIGHT, LEAVING, METRICS, SERVER_CONFIG, STARTED_AT, UPLOADS, InFlight
from widebeam.http.metrics import Metrics
from widebeam.http.middleware import around
from widebeam.http.recommend import prefill, recommend
from widebeam.http.tokens import detokenize, tokenize

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine


def build_app(engine: Engine, config: ServerConfig) -> web.Application:
    """The application over an engine that may still be starting. Needs a running event loop."""
    app = web.Application(middlewares=[around], client_max_size=config.max_body_bytes)
    app[ENGINE] = engine
    app[SERVER_CONFIG] = config
    app[METRICS] = Metrics(engine)
    app[IN_FLIGHT] = InFlight()
    app[LEAVING] = asyncio.Event()
    app[STARTED_AT] = time.time()
    app[UPLOADS] = asyncio.Semaphore(catalogs.MOST_UPLOADS)
    app.on_startup.extend([load_keyring, catalogs.check_root])
    app.add_routes(
        [
            web.post("/v1/recommend", recommend),
            web.post("/v1/prefill", prefill),
            web.post("/generate", generate),
            web.put("/generate", generate),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/v1/models", admin.list_models),
            web.get("/v1/models/{id:.+}", admin.show_model),
            web.get("/v1/catalogs", catalogs.list_catalogs),
            web.get("/v1/catalogs/{name}", catalogs.show_catalog),
            web.put("/v1/catalogs/{name}", catalogs.put_catalog),
            web.delete("/v1/catalogs/{name}", catalogs.remove_catalog),
            web.post("/v1/catalogs/{name}/items", catalogs.update_items),
            web.post("/v1/catalogs/{name}/rollback", catalogs.roll_back),
            web.get("/health", admin.health),
            web.get("/ping", admin.health),
            web.post("/ping", admin.health),
            web.get("/ready", admin.ready),
            web.get("/health_generate", admin.health_generate),
            web.get("/model_info", admin.model_info),
            web.get("/get_model_info", admin.model_info),
            web.get("/server_info", admin.server_info),
            web.get("/get_server_info", admin.server_info),
            web.get("/version", admin.version),
            web.get("/metrics", admin.metrics),
            web.post("/abort_request", admin.abort_request),
            web.get("/flush_cache", admin.flush_cache),
            web.post("/flush_cache", admin.flush_cache),
            web.get("/openapi.json", openapi.document),
        ]
    )
    return app
