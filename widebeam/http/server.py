"""Sockets, signals and shutdown: an engine becomes a server process.

While the engine starts, SIGTERM and SIGINT end the process at once. After that the first signal drains: `/ready` turns
503, after `drain_delay_s` new work is refused, and requests in flight get up to `drain_timeout_s` to finish. A second
signal stops at once. Either way whatever is still in flight is answered with 503.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvloop
from aiohttp import web

from widebeam.config import Config, ServerConfig, changed
from widebeam.errors import ConfigError, StartupError
from widebeam.http.app import build_app
from widebeam.http.keys import IN_FLIGHT, LEAVING
from widebeam.http.logs import configure, protocol_log

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine

log = logging.getLogger("widebeam.http")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BACKLOG = 1024
BROKEN = 70
"""Exit status (EX_SOFTWARE) when the engine is dead."""
_LAST_ANSWERS_S = 0.05
_ANSWER_TIMEOUT_S = 5.0  # for handlers to answer 503 once the engine has given up their requests


class Server:
    """HTTP around one engine, which its owner starts and stops. `url` is known after `start`."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config
        self._app = build_app(engine, config)
        self._runner = web.AppRunner(
            self._app,
            handler_cancellation=True,
            access_log=None,
            logger=protocol_log,
            auto_decompress=False,
            keepalive_timeout=config.keepalive_timeout_s,
            shutdown_timeout=_ANSWER_TIMEOUT_S / 2,  # it waits that long twice for a client that takes nothing
        )
        self.url = ""

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address is taken or not ours."""
        host, port = self._config.host, self._config.port
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=_BACKLOG).start()
        except OSError as error:
            await self._runner.cleanup()
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else error.strerror  # the loop's own words are long
            raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._runner.addresses[0][1]}"

    async def drain(self) -> bool:
        """Say that this server goes, after `drain_delay_s` refuse new work, and wait for what is in flight. False if
        that took longer than `drain_timeout_s`."""
        self._app[LEAVING].set()
        if self._engine.state == "ready":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine.died.wait(), self._config.drain_delay_s)
        self._engine.begin_drain()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._app[IN_FLIGHT].idle.wait()
        except TimeoutError:
            log.warning(
                "drain timeout: %g s have passed, and requests in flight are %d",
                self._config.drain_timeout_s, self._app[IN_FLIGHT].count,
            )  # fmt: skip
            return False
        return True

    async def stop(self) -> None:
        """Close the socket, and a moment later every connection: who connected just before still gets an answer."""
        for site in list(self._runner.sites):
            await site.stop()
        await asyncio.sleep(_LAST_ANSWERS_S)
        await self._runner.cleanup()
        self._app._state.clear()  # aiohttp has a cache that keeps applications, and with this one the engine, for good


class _Signals:
    """Catches SIGTERM and SIGINT within a `with` block, in the order in which they arrive.

    Behind it they end the process at once. An event loop's own handlers would leave Python's between: a signal that
    comes then is a traceback.
    """

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> _Signals:
        for number in _SIGNALS:
            signal.signal(number, self._arrive)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _arrive(self, number: int, _: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, signal.Signals(number))

    async def next(self) -> signal.Signals:
        return await self._arrived.get()


async def serve(config: Config) -> int:
    """Serve until a signal comes; returns the exit status: 0 after a drain, 128 + signal when told to stop at once, and
    BROKEN if the GPU or its thread broke, once everybody has been answered.

    Listens before the engine starts, so that `/health` can say "starting". Raises StartupError.
    """
    from widebeam.engine.engine import Engine

    engine = Engine(config.engine)
    server = Server(engine, config.server)
    await server.start()
    log.info("listening on %s; model %s is still to be loaded", server.url, config.engine.model)
    try:
        await engine.start()
        log.info("settings of the server that are not defaults: %s", changed(config.server))
        engine.freeze()
        with _Signals() as signals:
            print(f"ready on {server.url}", flush=True)
            number = await _or_signal(engine.died.wait(), signals)
            log.info("%s: draining", "the engine is dead" if number is None else number.name)
            second = await _or_signal(server.drain(), signals)
            if second is not None:
                return 128 + second
            return BROKEN if engine.died.is_set() else 0
    finally:
        await engine.stop()
        await server.stop()


async def _or_signal(work: Coroutine[Any, Any, object], signals: _Signals) -> signal.Signals | None:
    """Wait for the work or for a signal, which cancels it and is returned."""
    job, alarm = asyncio.ensure_future(work), asyncio.ensure_future(signals.next())
    await asyncio.wait((job, alarm), return_when=asyncio.FIRST_COMPLETED)
    if job.done():
        alarm.cancel()
        job.result()
        return None
    job.cancel()
    await asyncio.wait((job,))
    return alarm.result()


def run(config: Config) -> int:
    """`serve` on uvloop, with logging set up; returns the exit status. Raises StartupError."""
    configure(config.server.log_level, config.server.log_format)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a thread that loads weights cannot be interrupted in Python
    divided = config.engine.tensor_parallel_size > 1
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(serve(config))
    except StartupError:
        if divided:
            atexit.register(os._exit, 2)  # once the command has said why: see below
        raise
    if status == BROKEN or divided:  # a broken device, and NCCL too, may hold up the interpreter's own end for ever
        logging.shutdown()
        os._exit(status)
    return status
