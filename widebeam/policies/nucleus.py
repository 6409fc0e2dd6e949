"""Only as many beams as hold most of the probability go on."""

from __future__ import annotations

from widebeam.errors import InvalidRequest
from widebeam.policies.base import LevelPlan, PolicySpec, widths_of


def nucleus(spec: PolicySpec, levels: int, beam_width: int | None) -> LevelPlan:
    """After each level but the last, the best beams that together have `mass` of what all beams of the level have go
    on; at least `floor`, and at most the width of the level."""
    if spec.mass is None:
        raise InvalidRequest("policy 'nucleus' needs a mass", param="policy.mass")
    return LevelPlan(widths_of(spec, levels, beam_width), mass=spec.mass, floor=spec.floor or 1)
