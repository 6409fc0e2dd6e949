"""Results that are not all of one kind."""

from __future__ import annotations

from widebeam.errors import InvalidRequest
from widebeam.policies.base import LevelPlan, PolicySpec, widths_of


def diverse(spec: PolicySpec, levels: int, beam_width: int | None) -> LevelPlan:
    """After each level the best beams of which at most `cap` share a first token, up to the width of the level; so at
    most `cap` results do."""
    if spec.cap is None:
        raise InvalidRequest("policy 'diverse' needs a cap", param="policy.cap")
    return LevelPlan(widths_of(spec, levels, beam_width), cap=spec.cap)
