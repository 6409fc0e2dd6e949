"""From the bytes of a request to a typed struct, within bounds of time and size; and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import hdrs, web

from widebeam.errors import InvalidRequest, PayloadTooLarge, RequestTimeout
from widebeam.faults import find_fault, why_no_json
from widebeam.http.keys import SERVER_CONFIG

S = TypeVar("S", bound=msgspec.Struct)
Neutral = Mapping[str, tuple[Any, ...]]
"""Field name -> values at which the field asks for nothing, beside null, the empty ones and, unless true is among
them, false."""

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_LONGEST_NEUTRAL_BYTES = 16_384  # a list of defaults, one for each prompt of a batch


async def read_body(request: web.Request, setting: str = "max_body_bytes") -> bytes:
    """The whole body. Raises PayloadTooLarge over what that setting allows, RequestTimeout after `body_timeout_s`."""
    config = request.app[SERVER_CONFIG]
    limit = check_head(request, setting)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await request.clone(client_max_size=limit).read()
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {config.body_timeout_s:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large(limit, setting) from None


def check_head(request: web.Request, setting: str) -> int:
    """Refuse a body that is compressed, or is said to be over what that setting allows; the bytes that it allows."""
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity")
    if encoding.lower() != "identity":
        raise InvalidRequest(
            f"content-encoding {encoding!r} is not supported: send the body uncompressed",
            code="unsupported_content_encoding",
        )
    limit: int = getattr(request.app[SERVER_CONFIG], setting)
    if request.content_length is not None and request.content_length > limit:
        raise too_large(limit, setting)
    return limit


def too_large(limit: int, setting: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is over {limit} bytes (server option {setting})")


def decode(decoder: msgspec.json.Decoder[S], body: bytes, otherwise: str = "") -> S:
    """Decode and validate. Raises InvalidRequest with the field at fault as `param`.

    `otherwise`: what to do if it was never meant to be JSON.
    """
    try:
        if not body.isascii():
            body.decode()
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start}){otherwise}", code="malformed_utf8") from None
    except msgspec.ValidationError as error:
        raise invalid(error, decoder.type) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {why_no_json(error, body)}{otherwise}", code="malformed_json"
        ) from None


def invalid(error: msgspec.ValidationError, kind: Any) -> InvalidRequest:
    """The error for what msgspec says of a value that is no `kind`."""
    fault = find_fault(error, kind)
    code = "unknown_field" if fault.unknown else None
    return InvalidRequest(fault.text, code=code, param=fault.place or None)


def known_fields(neutral: Neutral, labels: Iterable[str] = ()) -> Callable[[type[S]], type[S]]:
    """Class decorator: one more field for each name, unparsed.

    Those of `neutral` are to be checked by `refuse_unsupported`. `labels` name or separate requests without asking
    anything of the answer, so any value is fine.
    """
    absent = msgspec.field(default_factory=msgspec.Raw)  # as a plain default it would have to be part of a JSON schema
    fields: list[tuple[str, Any, Any]] = [(name, msgspec.Raw, absent) for name in (*neutral, *labels)]

    def extend(base: type[S]) -> type[S]:
        extended = msgspec.defstruct(
            base.__name__,
            fields,
            bases=(base,),
            module=base.__module__,
            namespace={"__doc__": base.__doc__},
            kw_only=True,
            forbid_unknown_fields=True,
        )
        return cast(type[S], extended)

    return extend


def refuse_unsupported(struct: msgspec.Struct, neutral: Neutral, where: str = "") -> None:
    """Raise InvalidRequest for the first field of `neutral` that asks for something which this server cannot do."""
    for name, values in neutral.items():
        if not _asks_for_nothing(getattr(struct, name), values):
            allowed = ", ".join(msgspec.json.encode(value).decode() for value in (None, *values))
            raise InvalidRequest(
                f"{where}{name} is not supported by this server: leave it out or at its default ({allowed})",
                code="unsupported_field",
                param=where + name,
            )


def _asks_for_nothing(raw: msgspec.Raw, values: tuple[Any, ...]) -> bool:
    size = len(memoryview(raw))
    if size == 0:  # the field was not sent
        return True
    if size > _LONGEST_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):  # a number beyond float64; nested to the very limit
        return False
    neutral = values + _EMPTY + (() if any(v is True for v in values) else (False,))
    return _among(value, neutral) or (isinstance(value, list) and all(_among(item, neutral) for item in value))


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    """Equality that tells 0 from false and 1 from true, as the wire does."""
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)


def json_response(content: Any, status: int = 200) -> web.Response:
    """One line of JSON."""
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")
