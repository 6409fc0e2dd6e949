"""The same width at every level."""

from __future__ import annotations

from widebeam.policies.base import LevelPlan, PolicySpec, widths_of


def fixed(spec: PolicySpec, levels: int, beam_width: int | None) -> LevelPlan:
    """`beam_width` at every level; 1 where the request names none."""
    return LevelPlan(widths_of(spec, levels, beam_width))
