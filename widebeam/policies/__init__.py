"""How wide the beam is at each level. A policy is chosen by name; see base.py to add one."""

from widebeam.policies.base import POLICIES, Policy, PolicySpec, beam_widths

__all__ = ["POLICIES", "Policy", "PolicySpec", "beam_widths"]
