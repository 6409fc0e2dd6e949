"""What a wave found, packed for its way home.

Letters: L levels, F finished sequences, J decoded tokens, R rows, B requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from widebeam.engine.core import Core
from widebeam.engine.shapes import depth_rung
from widebeam.engine.staging import HostCopy, Parts
from widebeam.engine.state import BeamState
from widebeam.engine.wave import Wave


def collect(core: Core, wave: Wave) -> HostCopy:
    """Follow the finished sequences' paths through the history and send it all home, as `flight.unpack` takes it."""
    sizes = wave.places, depth_rung(wave.num_levels)
    core.programs.pack(core, *sizes)
    return HostCopy(core.state.home, parts(core.state, *sizes))


def parts(state: BeamState, places: int, levels: int) -> Parts:
    """What `pack` lays one behind the other: token_LF, logprob_LF, (length, node, reason), (score, cum), broken_B."""
    F, L = places, levels
    return [
        ((L, F), torch.int32),
        ((L, F), torch.float32),
        ((3, F), torch.int32),
        ((2, F), torch.float32),
        (state.broken_B.shape, torch.int32),
    ]


def pack(core: Core, places: int, levels: int) -> None:
    """The first F = `places` finished sequences, of at most L = `levels` tokens, to `state.home`, as in `parts`.

    Tokens before the last are found in the history by the sequence's path. Tokens and their log-probabilities are 0
    beyond a sequence's length, and in empty places (score -inf), whose paths are never looked at. Integers keep their
    low 32 bits, floats all bits.
    """
    state = core.state
    done = state.finished.head(places, levels)
    last_F = torch.where(done.score > -torch.inf, done.length - 1, -1)
    level_L1 = torch.arange(levels, device=last_F.device)[:, None]
    before_LF, last_LF = level_L1 < last_F, level_L1 == last_F
    path_LF = torch.where(before_LF, done.path.t(), 0).long()
    found = (
        _spelled(state.token_JR[:levels].gather(1, path_LF), before_LF, done.token.int(), last_LF),
        _spelled(state.logprob_JR[:levels].gather(1, path_LF), before_LF, done.logprob, last_LF),
        *(each.int() for each in (done.length, done.node, done.reason)),
        done.score,
        done.cum,
        state.broken_B,
    )
    flat = torch.cat([part.view(torch.int32).flatten() for part in found])
    state.home[: len(flat)].copy_(flat)


def growing(core: Core, wave: Wave, level: int) -> HostCopy:
    """The rows that go on to this level, at home: their tokens and log-probabilities so far, [level, R], and cum_R,
    which is -inf where there is none."""
    state, rows = core.state, wave.decoded(level)
    path_LR = state.path_RJ[:rows, :level].t().long()
    token_LR, logprob_LR = (history[:level].gather(1, path_LR) for history in (state.token_JR, state.logprob_JR))
    return HostCopy.of([token_LR, logprob_LR, state.cum_R[:rows]])


def _spelled(history_LF: Tensor, before_LF: Tensor, last_F: Tensor, last_LF: Tensor) -> Tensor:
    """What the history has of a sequence, then what its last token has, then zeros."""
    return torch.where(before_LF, history_LF, torch.where(last_LF, last_F, 0))
