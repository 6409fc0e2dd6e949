"""Log lines: one for each request, and the form of all of them. Prompts, item ids and API keys are never in one."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from aiohttp.http_exceptions import HttpProcessingError

if TYPE_CHECKING:
    from widebeam.engine.request import SearchResult

log = logging.getLogger("widebeam.http")
LogFormat = Literal["text", "json"]
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass
class RequestFacts:
    """What a request's searches were: of a batch the sums of prompt and cached tokens, and of the rest the largest."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    width: int | None = None
    levels: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    engine_ms: float | None = None
    catalog: str | None = None
    version: int | None = None

    def add(self, result: SearchResult) -> None:
        """One more search is done."""
        timing = result.timing_ms
        self.prompt_tokens = (self.prompt_tokens or 0) + result.prompt_tokens
        self.cached_tokens = (self.cached_tokens or 0) + result.cached_tokens
        self.width = max(self.width or 0, *result.widths)
        self.levels = max(self.levels or 0, len(result.widths))
        self.queue_ms = max(self.queue_ms or 0.0, round(timing.queue, 3))
        self.prefill_ms = max(self.prefill_ms or 0.0, round(timing.prefill, 3))
        self.decode_ms = max(self.decode_ms or 0.0, round(timing.decode, 3))
        self.engine_ms = max(self.engine_ms or 0.0, round(timing.total, 3))
        self.catalog, self.version = result.catalog, result.catalog_version

    def add_earlier(self, result: SearchResult) -> None:
        """A search for which those that were added had to wait: times add up."""
        timing = result.timing_ms
        self.prompt_tokens = (self.prompt_tokens or 0) + result.prompt_tokens
        self.cached_tokens = (self.cached_tokens or 0) + result.cached_tokens
        self.levels = max(self.levels or 0, len(result.widths))
        self.queue_ms = round((self.queue_ms or 0.0) + timing.queue, 3)
        self.prefill_ms = round((self.prefill_ms or 0.0) + timing.prefill, 3)
        self.decode_ms = round((self.decode_ms or 0.0) + timing.decode, 3)
        self.engine_ms = round((self.engine_ms or 0.0) + timing.total, 3)


def log_request(
    level: int, head: dict[str, Any], facts: RequestFacts, *, request_id: str, code: str | None, seconds: float
) -> None:
    """The one line of a request. `head` says what was asked and how it ended: method, route, status and outcome."""
    if not log.isEnabledFor(level):
        return
    rest = {"request_id": request_id, "code": code, "total_ms": round(seconds * 1e3, 3), **vars(facts)}
    known = {name: value for name, value in rest.items() if value is not None}
    told = [*map(str, head.values()), *(f"{name}={value}" for name, value in known.items())]
    log.log(level, "%s", " ".join(told), extra={"fields": {**head, **known}})


def configure(level: str, form: LogFormat) -> None:
    """Send the whole process's log to stderr in one form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(form == "json")


class TextFormatter(logging.Formatter):
    """A line with time, level and logger; only a traceback takes more than one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _on_one_line(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time`, `level`, `logger`, and `message` or the fields of a request's line."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
        line |= getattr(record, "fields", None) or {"message": _on_one_line(record.getMessage())}
        exception = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        if exception:
            line["exception"] = _encodable(exception)
        return msgspec.json.encode(line).decode()


def _on_one_line(text: str) -> str:
    """Control characters as escapes, so that no text looks like another line."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class _WithoutBytes(logging.Filter):
    """The parser's messages quote what the client sent, which may hold a key or a prompt."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            log.info("broken HTTP (%s)", type(error).__name__)
            return False
        return True


protocol_log = logging.getLogger("widebeam.http.protocol")
"""For aiohttp, of connections and broken requests."""
protocol_log.addFilter(_WithoutBytes())
