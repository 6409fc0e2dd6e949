"""The same width at every level."""

from __future__ import annotations

from widebeam.errors import InvalidRequest
from widebeam.policies.base import PolicySpec


def fixed(spec: PolicySpec, levels: int, beam_width: int | None) -> tuple[int, ...]:
    """`beam_width` at every level; 1 where the request names none."""
    if spec.widths is not None:
        raise InvalidRequest(
            "policy 'fixed' takes its width from beam_width, not from widths; use policy 'scheduled'",
            param="policy.widths",
        )
    return (beam_width or 1,) * levels
