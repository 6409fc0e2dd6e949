"""The policy registry and what a policy is. Imports no torch: a plan is known before the wave starts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from widebeam.config import MAX_BEAM_WIDTH, MAX_LEVELS, Seed
from widebeam.errors import EngineError, InvalidRequest, RequestError
from widebeam.faults import counted
from widebeam.registry import Registry

log = logging.getLogger("widebeam.policies")

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
    cap: Width | None = None
    """diverse: most beams that share a first token."""
    seed: Seed | None = None
    """stochastic: the same seed draws the same sample of a prompt. None: one made from the prompt."""


class LevelPlan(NamedTuple):
    """What a search does at each level: one width a level, and mechanisms that are off by default and may be combined,
    but for giving beams up in a sample. All of it is known before the search starts, and data to the device."""

    widths: tuple[int, ...]
    """Most beams after each level."""
    margin: float = math.inf
    """Beams whose cumulative log-probability is further below the best one's are given up, but at the last level."""
    mass: float = 1.0
    """Only the best beams that together have this share of the level's probability go on, but at the last level."""
    floor: int = 1
    """So many beams are not given up by either."""
    cap: int | None = None
    """Of the beams after a level, and of the results, at most so many share a first token."""
    noise: bool = False
    """Beams are a sample without replacement instead of the best: see engine/stochastic.py."""
    seed: int | None = None
    """Of the noise; None: one made from the prompt."""

    @property
    def prunes(self) -> bool:
        """Fewer beams may go on than there is room for."""
        return self.margin < math.inf or self.mass < 1

    @property
    def only_widths(self) -> bool:
        return not self.prunes and self.cap is None and not self.noise

    def wrong(self, levels: int) -> str | None:
        """What is not as declared, for a plan from code of others."""
        numbers = (*self.widths, self.floor, *(() if self.cap is None else (self.cap,)))
        if len(self.widths) != levels:
            return f"{counted(len(self.widths), 'width')} for {counted(levels, 'level')}"
        if any(type(number) is not int or not 1 <= number <= MAX_BEAM_WIDTH for number in numbers):
            return f"widths, floor and cap must be integers from 1 to {MAX_BEAM_WIDTH}"
        if not all(isinstance(number, int | float) for number in (self.margin, self.mass)):
            return "margin and mass must be numbers"
        if not self.margin >= 0 or not 0 < self.mass <= 1:
            return "margin must be 0 or more, and mass above 0, to 1"
        if type(self.noise) is not bool:
            return "noise must be true or false"
        if self.seed is not None and (type(self.seed) is not int or not -(2**63) <= self.seed < 2**63):
            return "seed must be an integer of 64 bits with sign"
        return "a sample gives no beams up by margin or mass" if self.noise and self.prunes else None


Policy = Callable[[PolicySpec, int, int | None], LevelPlan]
"""(spec, levels, beam_width) -> the plan, with `levels` widths. Raises InvalidRequest."""

POLICIES: Registry[Policy] = Registry("policy", group="widebeam.policies")
POLICIES.add("fixed", "widebeam.policies.fixed:fixed")
POLICIES.add("scheduled", "widebeam.policies.scheduled:scheduled")
POLICIES.add("score_margin", "widebeam.policies.score_margin:score_margin")
POLICIES.add("nucleus", "widebeam.policies.nucleus:nucleus")
POLICIES.add("diverse", "widebeam.policies.diverse:diverse")
POLICIES.add("stochastic", "widebeam.policies.stochastic:stochastic")
USED = {
    "fixed": (),
    "scheduled": ("widths",),
    "score_margin": ("widths", "margin", "floor"),
    "nucleus": ("widths", "mass", "floor"),
    "diverse": ("widths", "cap"),
    "stochastic": ("widths", "seed"),
}
"""Fields that our own policies look at; the others are refused for them. Those of others look at what they like."""


def level_plan(spec: PolicySpec | None, levels: int, beam_width: int | None) -> LevelPlan:
    """The plan for so many levels. Raises InvalidRequest, or EngineError if the policy is broken."""
    spec = spec or PolicySpec(name="fixed")
    try:
        policy = POLICIES.get(spec.name)
    except KeyError as error:
        raise InvalidRequest(str(error.args[0]), code="unknown_policy", param="policy.name") from None
    for field in PolicySpec.__struct_fields__[1:]:
        if getattr(spec, field) is not None and field not in USED.get(spec.name, PolicySpec.__struct_fields__):
            raise InvalidRequest(f"policy {spec.name!r} has no {field}", param=f"policy.{field}")
    try:
        plan = policy(spec, levels, beam_width)
        wrong = plan.wrong(levels)
    except RequestError:
        raise
    except Exception as error:
        log.exception("policy %r failed", spec.name)
        wrong = type(error).__name__
    if wrong is not None:
        raise EngineError(
            f"policy {spec.name!r} gives no valid plan: {wrong}", code="broken_policy", param="policy.name"
        )
    return plan


def widths_of(spec: PolicySpec, levels: int, beam_width: int | None) -> tuple[int, ...]:
    """`spec.widths`, the last one repeated where there are more levels; without them `beam_width` at every level.

    `beam_width`, if given as well, must equal the largest width, so that the two never contradict each other.
    """
    widths = spec.widths
    if not widths:
        return (beam_width or 1,) * levels
    if len(widths) > levels:
        raise InvalidRequest(
            f"policy.widths has {counted(len(widths), 'width')}, but the search has {counted(levels, 'level')}",
            param="policy.widths",
        )
    if beam_width is not None and beam_width != max(widths):
        raise InvalidRequest(
            f"beam_width {beam_width} is not the largest of policy.widths ({max(widths)}); leave it out",
            param="beam_width",
        )
    return widths + (widths[-1],) * (levels - len(widths))
