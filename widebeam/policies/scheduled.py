"""One width for each level: narrow where codes are few, wide where the catalog fans out."""

from __future__ import annotations

from widebeam.errors import InvalidRequest
from widebeam.policies.base import LevelPlan, PolicySpec, widths_of


def scheduled(spec: PolicySpec, levels: int, beam_width: int | None) -> LevelPlan:
    """`widths[level]`; the last one is repeated when there are more levels than widths."""
    if not spec.widths:
        raise InvalidRequest("policy 'scheduled' needs widths, one for each level", param="policy.widths")
    return LevelPlan(widths_of(spec, levels, beam_width))
