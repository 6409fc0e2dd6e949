"""When graph trees capture at once, and when they first run what is new."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler

from widebeam.engine.compile import captured_at_once


def at_once() -> bool:
    """Whether graph trees would capture a size that they have not run before."""
    return bool(torch._inductor.config.triton.skip_cudagraph_warmup)


def plus_one() -> Callable[[torch.Tensor], torch.Tensor]:
    """Compiled when it is first called."""
    torch._dynamo.reset()
    return torch.compile(lambda x: x + 1, backend="eager", dynamic=True)


def test_what_is_compiled_is_run_before_it_is_captured() -> None:
    function = plus_one()
    with captured_at_once():
        assert at_once()
        function(torch.ones(3))
        assert not at_once()
    with captured_at_once():
        function(torch.ones(4))
        assert at_once(), "a size of a known function"
        with callback_handler.install_callbacks(CallbackTrigger.CUDAGRAPH_RECORDING, "0/0"):
            pass
        assert at_once(), "a capture compiles nothing"
    assert not at_once() and not callback_handler.start_callbacks
