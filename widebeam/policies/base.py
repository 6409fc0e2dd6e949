"""The policy registry and what a policy is. Imports no torch: a plan is known before the wave starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from widebeam.config import MAX_BEAM_WIDTH, MAX_LEVELS
from widebeam.errors import InvalidRequest
from widebeam.registry import Registry

Width = Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)]


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy as a request names it: `{"name": "scheduled", "widths": [64, 256, 32]}`."""

    name: str
    widths: Annotated[tuple[Width, ...], Meta(max_length=MAX_LEVELS)] | None = None
    margin: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """score_margin: how far behind the best a beam may be, in cumulative log-probability."""
    mass: Annotated[float, Meta(gt=0, le=1)] | None = None
    """nucleus: the share of the beams' probability that goes on."""
    floor: Width | None = None
    """score_margin, nucleus: so many beams go on in any case. None: one."""


class LevelPlan(NamedTuple):
    """What a search does at each level."""

    widths: tuple[int, ...]
    """Most beams after each level."""
    margin: float = math.inf
    mass: float = 1.0
    floor: int = 1

    @property
    def prunes(self) -> bool:
        """Fewer beams may go on than there is room for."""
        return self.margin < math.inf or self.mass < 1


Policy = Callable[[PolicySpec, int, int | None], LevelPlan]
"""(spec, levels, beam_width) -> the plan, with `levels` widths. Raises InvalidRequest."""

POLICIES: Registry[Policy] = Registry("policy")
POLICIES.add("fixed", "widebeam.policies.fixed:fixed")
POLICIES.add("scheduled", "widebeam.policies.scheduled:scheduled")
POLICIES.add("score_margin", "widebeam.policies.score_margin:score_margin")
POLICIES.add("nucleus", "widebeam.policies.nucleus:nucleus")
USED = {
    "fixed": (),
    "scheduled": ("widths",),
    "score_margin": ("widths", "margin", "floor"),
    "nucleus": ("widths", "mass", "floor"),
}
"""Fields that our own policies look at; the others are refused for them."""


def level_plan(spec: PolicySpec | None, levels: int, beam_width: int | None) -> LevelPlan:
    """The plan for so many levels. Raises InvalidRequest."""
    spec = spec or PolicySpec(name="fixed")
    try:
        policy = POLICIES.get(spec.name)
    except KeyError as error:
        raise InvalidRequest(str(error.args[0]), code="unknown_policy", param="policy.name") from None
    for field in PolicySpec.__struct_fields__[1:]:
        if getattr(spec, field) is not None and field not in USED.get(spec.name, PolicySpec.__struct_fields__):
            raise InvalidRequest(f"policy {spec.name!r} has no {field}", param=f"policy.{field}")
    return policy(spec, levels, beam_width)


def widths_of(spec: PolicySpec, levels: int, beam_width: int | None) -> tuple[int, ...]:
    """`spec.widths`, the last one repeated where there are more levels; without them `beam_width` at every level.

    `beam_width`, if given as well, must equal the largest width, so that the two never contradict each other.
    """
    widths = spec.widths
    if not widths:
        return (beam_width or 1,) * levels
    if len(widths) > levels:
        raise InvalidRequest(
            f"policy.widths has {len(widths)} entries, but the search has {levels} levels", param="policy.widths"
        )
    if beam_width is not None and beam_width != max(widths):
        raise InvalidRequest(
            f"beam_width {beam_width} is not the largest of policy.widths ({max(widths)}); leave it out",
            param="beam_width",
        )
    return widths + (widths[-1],) * (levels - len(widths))
