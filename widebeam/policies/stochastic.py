"""Beams that are drawn instead of the best."""

from __future__ import annotations

from widebeam.policies.base import LevelPlan, PolicySpec, widths_of


def stochastic(spec: PolicySpec, levels: int, beam_width: int | None) -> LevelPlan:
    """A sample of sequences without replacement from the model's distribution over what is legal, listed by their
    noise-free scores. The same `seed` draws the same of a prompt, whatever else runs."""
    return LevelPlan(widths_of(spec, levels, beam_width), noise=True, seed=spec.seed)
