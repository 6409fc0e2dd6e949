"""How the device functions are compiled: every option in one place.

Each function is compiled once, for any size, and CUDA-graph trees capture it for each size that comes: capturing takes
a fraction of a second, compiling many. Nothing here changes what a search returns.
"""

from __future__ import annotations

import threading
import types
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from widebeam.engine.advance import advance
from widebeam.engine.core import Core, Programs
from widebeam.engine.packing import pack
from widebeam.engine.shapes import COMMON_TOKENS, REQUEST_RUNGS, token_rungs
from widebeam.engine.state import PackedPrompts, fixed_of
from widebeam.engine.step import Reuse, forward_rows, prompt_body, prompt_last
from widebeam.model.layers import Stream

if TYPE_CHECKING:
    from torch._dynamo.callback import CallbackArgs

EAGER = Programs(prompt_body, prompt_last, forward_rows, advance, pack)
"""The functions as they are: the CPU's, and what every compiled form must equal."""
VARIANTS = 512
"""Forms of one function that may be compiled: finishing or not, stop tokens or not, or one for each size if tuned."""

Program = Callable[..., None]


def graphed(function: Program) -> Program:
    """Compiled once for all sizes, with cuBLAS for the products, and captured for each size."""
    return torch.compile(_own(function), mode="reduce-overhead", fullgraph=True, dynamic=True)


def tuned(function: Program) -> Program:
    """What levels run through the network: compiled for each size, with the fastest of several products. For prompts
    cuBLAS' own choice was the fastest wherever it was measured."""
    if function is not forward_rows:
        return graphed(function)
    return torch.compile(_own(function), mode="max-autotune", fullgraph=True, dynamic=False)


def _own(function: Program) -> Program:
    """A copy with a code object of its own, by which torch keeps what it compiled: else a second engine in the process
    would replay the first one's graphs."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


class Replayed:
    """A compiled function that replays its graphs by itself, once graph trees have captured them.

    Before a replay torch checks every guard, each input and what earlier graphs left, which takes more of the host's
    time than all the rest of a launch. Here nothing is left to check: no graph returns anything, and all that one reads
    and writes lies in a fixed place, so that places and sizes of the arguments say which it is.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program, self._device = program, device
        self._nodes: dict[Hashable, Any] = {}
        """Graph trees' nodes, by what they are for: they hold their graphs."""
        self._whole: set[Any] = set()
        """Nodes that were all that a call captured. Torch may cut a function in parts around what no graph can hold."""

    def __call__(self, core: Core, *args: Any) -> None:
        key = fixed_of(args)
        if (node := self._nodes.get(key)) is not None:
            node.run_graph()
            return
        before, captured = self._last_node(), made_so_far(self._device).captured
        self._program(core, *args)
        node = self._last_node()
        if node is None or node is before or copies_inputs(node):
            return
        if made_so_far(self._device).captured == captured + 1:
            self._whole.add(node)
        if node in self._whole:
            self._nodes[key] = node

    def _last_node(self) -> Any:
        """The graph that graph trees captured or replayed last; None if there is none, as on a CPU."""
        manager = graph_trees(self._device)
        node = manager.current_node if manager is not None else None
        return node if hasattr(node, "run_graph") else None


def copies_inputs(node: Any) -> bool:
    """Whether a graph reads copies of some of the tensors that it is called with."""
    return any(isinstance(node.reconstructed_inputs[i], Tensor) for i in node.non_static_input_idx)


def graph_trees(device: torch.device) -> Any:
    """What captures this thread's graphs on a device; None if there is none yet, or it is a CPU."""
    if device.type != "cuda":
        return None
    from torch._inductor import cudagraph_trees  # torch loads it with the first graph

    return cudagraph_trees.get_manager(device.index, create_if_none_exists=False)


def _own_graph_trees() -> None:
    """Graph trees belong to a thread, and torch 2.11 prepares only the one that first imports them."""
    from torch._inductor import cudagraph_trees

    if not hasattr(cudagraph_trees.local, "tree_manager_containers"):
        cudagraph_trees.local.tree_manager_containers = {}
        cudagraph_trees.local.tree_manager_locks = defaultdict(threading.Lock)


def compiled_programs(core: Core, compiler: Callable[[Program], Program] = graphed) -> Programs:
    """The device functions in a compiled form, for this core's buffers, which must stay where they are.

    Called on the thread that will run them.
    """
    if core.state.level.device.type == "cuda":
        _own_graph_trees()
    torch.fx.experimental._config.use_duck_shape = False  # sizes that happen to be equal are not one size
    # torch 2.11 on Python 3.12 keeps pointers to guards, and to what they watch, longer than either lives: memory may
    # break when an engine is dropped or the process ends (https://github.com/pytorch/pytorch/pull/181873)
    torch._dynamo.config.use_recursive_dict_tags_for_guards = False
    torch._dynamo.config.specialize_float = True  # ours never change; else every function is traced twice
    torch._dynamo.config.recompile_limit = VARIANTS
    torch._dynamo.config.accumulated_recompile_limit = VARIANTS
    torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit = None
    _keep_in_place(core)
    device = core.state.level.device
    functions: dict[str, Program] = {
        "body": kept_body, "last": kept_last, "forward_rows": forward_rows, "advance": advance, "pack": pack
    }  # fmt: skip
    return Programs(
        **{name: Replayed(compiler(function), device) for name, function in functions.items()},
        graphed={(requests, tokens, 0) for requests in REQUEST_RUNGS for tokens in token_rungs(COMMON_TOKENS)},
    )


class Made(NamedTuple):
    """What this process has made so far."""

    compiled: int
    captured: int
    skipped: int
    """Graphs that could not be captured."""


def made_so_far(device: torch.device) -> Made:
    """Counts of graphs; they stand still once every shape in use is known."""
    counters, trees = torch._dynamo.utils.counters, graph_trees(device)
    captured = sum(len(nodes) for nodes in trees.roots.values()) if trees is not None else 0
    return Made(counters["stats"]["unique_graphs"], captured, counters["inductor"]["cudagraph_skips"])


@contextmanager
def captured_at_once() -> Iterator[None]:
    """Graph trees run what they capture once before, for each size, so that all its kernels are loaded. Within this
    they do not, until something is compiled: its kernels are chosen when they first run, which no capture allows."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler  # 2 s to load, which a CPU does without

    def rehearse(begun: CallbackArgs) -> None:
        if begun.callback_trigger == CallbackTrigger.DYNAMO:
            torch._inductor.config.triton.skip_cudagraph_warmup = False

    with torch._inductor.config.patch({"triton.skip_cudagraph_warmup": True}):
        callback_handler.register_start_callback(rehearse)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(rehearse)


def kept_body(core: Core, prompts: PackedPrompts, plan: int, reuse: Reuse | None) -> None:
    """`prompt_body` that returns nothing: a graph that returned tensors would keep others from running."""
    residual, delta = prompt_body(core, prompts, plan, reuse)
    core.state.stream_TH[: residual.shape[0]].copy_(residual if delta is None else residual + delta)


def kept_last(core: Core, prompts: PackedPrompts, stream: None) -> None:
    """`prompt_last` behind `kept_body`."""
    rows = prompts.tokens_T.shape[0]
    prompt_last(core, prompts, Stream(core.state.stream_TH[:rows], None))


def _keep_in_place(core: Core) -> None:
    """Promise the compiler that what a level reads and writes never moves: graphs then use it where it is."""
    state = core.state
    own = [value for value in vars(state).values() if isinstance(value, Tensor)]
    rooms = [*core.catalogs.nodes, core.masks.words, core.masks.before]
    for buffer in [*own, *state.finished, *core.context.pools, *core.beams.pools, *rooms]:
        # of a pool of symbolic size torch 2.13 loses where a layer begins, and each symbolic size costs a look a call
        torch._dynamo.mark_static(buffer)
        _promise(buffer)
    state.brought.promise(_promise)


def _promise(buffer: Tensor) -> None:
    torch._dynamo.mark_static_address(buffer, guard=False)
