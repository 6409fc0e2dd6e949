"""One width for each level: narrow where codes are few, wide where the catalog fans out."""

from __future__ import annotations

from widebeam.errors import InvalidRequest
from widebeam.policies.base import PolicySpec


def scheduled(spec: PolicySpec, levels: int, beam_width: int | None) -> tuple[int, ...]:
    """`widths[level]`; the last one is repeated when there are more levels than widths.

    `beam_width`, if given as well, must equal the largest width, so that the two never contradict each other.
    """
    widths = spec.widths
    if not widths:
        raise InvalidRequest("policy 'scheduled' needs widths, one for each level", param="policy.widths")
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
