"""Beams that fall too far behind the best one are given up."""

from __future__ import annotations

from widebeam.errors import InvalidRequest
from widebeam.policies.base import LevelPlan, PolicySpec, widths_of


def score_margin(spec: PolicySpec, levels: int, beam_width: int | None) -> LevelPlan:
    """After each level but the last, beams whose cumulative log-probability is more than `margin` below the best one's
    are given up; at least `floor` stay, and at most the width of the level."""
    if spec.margin is None:
        raise InvalidRequest("policy 'score_margin' needs a margin", param="policy.margin")
    return LevelPlan(widths_of(spec, levels, beam_width), margin=spec.margin, floor=spec.floor or 1)
