"""What every error of the tree tells, so that a caller may catch the base and read any of it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator

import pytest

from widebeam import errors
from widebeam.errors import ConfigError, ServerUnreachable, StartupError, WideBeamError
from widebeam.retries import error_of


def tree(kind: type[WideBeamError]) -> Iterator[type[WideBeamError]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from tree(below)


@pytest.mark.parametrize("kind", [*tree(WideBeamError)])
def test_every_error_tells_the_same_things(kind: type[WideBeamError]) -> None:
    needed = [
        one for one in inspect.signature(kind).parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]  # fmt: skip
    error = kind(*(f"told {place}" for place, _ in enumerate(needed)))
    assert error.message == str(error) == "told 0"
    assert re.fullmatch("[a-z_]+", error.code)
    assert (error.param, error.retry_after_s, error.by_another) == (None, None, False)
    answers = not issubclass(kind, ServerUnreachable | StartupError) and kind is not WideBeamError
    assert (error.status is not None and 400 <= error.status < 600) if answers else error.status is None
    assert kind is ServerUnreachable or isinstance(error.retryable, bool)


def test_codes_tell_classes_apart() -> None:
    codes = [kind.code for kind in tree(WideBeamError)]
    assert len(codes) == len({*codes}) + 1  # RequestError has its base's


@pytest.mark.parametrize("kind", [*tree(errors.RequestError)])
def test_an_answer_of_each_kind_is_read_as_that_kind(kind: type[errors.RequestError]) -> None:
    told = {"message": "m", "type": kind.code, "code": kind.code, "param": "n", "retry_after_s": 0.5}
    error = error_of(kind.status, {}, json.dumps({"error": told}).encode())
    assert type(error) is kind
    assert (error.message, error.code, error.status, error.param, error.retry_after_s) == (
        "m", kind.code, kind.status, "n", 0.5,
    )  # fmt: skip


def test_the_base_says_what_a_start_lacks() -> None:
    with pytest.raises(WideBeamError) as caught:
        raise ConfigError("--port is taken")
    assert (caught.value.code, caught.value.status) == ("invalid_config", None)
