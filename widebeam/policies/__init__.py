"""How many beams go on after each level. A policy is chosen by name; see base.py to add one."""

from widebeam.policies.base import POLICIES, BeamPlan, Policy, PolicySpec, beam_plan

__all__ = ["POLICIES", "BeamPlan", "Policy", "PolicySpec", "beam_plan"]
