"""How many beams go on after each level. A policy is chosen by name; see base.py to add one."""

from widebeam.policies.base import POLICIES, LevelPlan, Policy, PolicySpec, level_plan, widths_of

__all__ = ["POLICIES", "LevelPlan", "Policy", "PolicySpec", "level_plan", "widths_of"]
