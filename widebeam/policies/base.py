"""The policy registry and what a policy is. Imports no torch: widths are known before the wave starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from widebeam.config import MAX_BEAM_WIDTH, MAX_LEVELS
from widebeam.errors import InvalidRequest
from widebeam.registry import Registry


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy as a request names it: `{"name": "scheduled", "widths": [64, 256, 32]}`."""

    name: str
    widths: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)], ...], Meta(max_length=MAX_LEVELS)] | None = (
        None
    )


Policy = Callable[[PolicySpec, int, int | None], tuple[int, ...]]
"""(spec, levels, beam_width) -> the beam width at each level, `levels` long. Raises InvalidRequest."""

POLICIES: Registry[Policy] = Registry("policy")
POLICIES.add("fixed", "widebeam.policies.fixed:fixed")
POLICIES.add("scheduled", "widebeam.policies.scheduled:scheduled")


def beam_widths(spec: PolicySpec | None, levels: int, beam_width: int | None) -> tuple[int, ...]:
    """Beam width at each of `levels` levels."""
    spec = spec or PolicySpec(name="fixed")
    try:
        policy = POLICIES.get(spec.name)
    except KeyError as error:
        raise InvalidRequest(str(error.args[0]), code="unknown_policy", param="policy.name") from None
    return policy(spec, levels, beam_width)
